"""Rows as Parquet or JSON files in a folder, published by numbered commit entries."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.errors import Fenced, JobError, PublishFailed, TargetForeign
from onceflow.sinks.base import Sink, Staged, columns, parse_bytes, refuse_difference
from onceflow.sinks.commits import (
    Folder,
    commit_log,
    data_files,
    published_files,
    refuse_other_size,
    roll_up,
)
from onceflow.sinks.committables import BY, COMMITTER, NO_GLOB, describe, verify
from onceflow.sinks.ledger import (
    Committable,
    Ledger,
    Outcome,
    Publication,
    judge,
    staged_file_gone,
)
from onceflow.storage import (
    LocalStore,
    NumberedLog,
    Put,
    fsync_dir,
    fsync_file,
    make_dirs,
    translate_disk_full,
)
from onceflow.testing.faults import reach

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Spark's own patterns for JSON cut a timestamp to milliseconds.
_JSON_TIMES = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


class Files(Sink):
    """Every row of a decided epoch is in the folder exactly once, in files that never change.

    A plain reader of the folder (`spark.read.parquet`, DuckDB) sees rows of decided epochs only,
    but in the middle of a publish perhaps a part of the newest epoch, and it takes the values of
    `by` columns from folder names, where the empty string and null are the same. `Files.read`
    sees whole epochs only, with every value as it was written.

    `by` makes sub-folders (`country=NL/`); the columns stay in the files too. `roll` is about how
    large a file may become before the next one is begun.
    """

    modes = ("append",)
    roll_up_every = 100  # commits

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "parquet",
        by: Iterable[str] = (),
        roll: str = "256 MB",
    ) -> None:
        if format not in ("parquet", "json"):
            raise JobError(f"Files does not write {format!r}", hint='use "parquet" or "json"')
        if isinstance(by, str):
            by = (by,)
        self.path = Path(os.path.abspath(path))
        self.format = format
        self.by = tuple(by)
        self.roll_bytes = parse_bytes(roll)
        self._log = commit_log(self.path)
        self._folder = Folder()
        self._fenced_term: int | None = None
        self._json_bytes_per_row = 200.0  # until the first epoch tells
        for name in self.by:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise JobError(
                    f"column {name!r} cannot name a folder",
                    hint="rename it with letters and digits",
                )

    def __str__(self) -> str:
        return f"Files({str(self.path)!r})"

    def target(self) -> dict[str, Any]:
        by, roll = list(self.by), f"{self.roll_bytes} B"
        return {
            "kind": "files", "path": str(self.path), "format": self.format, "by": by, "roll": roll,
        }  # fmt: skip

    # -------------------------------------------------------------- before an epoch

    def prepare(self, output: str, schema: str, mode: str) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise TargetForeign(f"{self.path} is not a folder", hint="name a new folder")
        self.refuse_mode(
            mode,
            "files cannot be updated: use Sqlite(path, table=…, key=…) for update and complete",
        )
        if self.format == "json":
            _refuse_maps(schema, str(self))
        missing = [name for name in self.by if name not in columns(schema)]
        if missing:
            raise JobError(f"{self}: there is no column {', '.join(missing)} to partition by")
        log, folder = self._read()
        if folder.position == 0 and log.size() == 0:
            strange = sorted(os.listdir(self.path)) if self.path.exists() else []
            strange = [name for name in strange if name != "_commits"]
            if strange:
                raise TargetForeign(
                    f"{self.path} holds files that no output of onceflow wrote: {_some(strange)}",
                    hint="name a new or an empty folder",
                )
            return
        self._refuse_other_owner(folder, output)
        if folder.schema:
            refuse_difference(str(self), columns(folder.schema), columns(schema))
        if folder.layout and folder.layout != self._layout():
            raise TargetForeign(
                f"{self.path} was written with {folder.layout}, now it is {self._layout()}",
                hint="keep format and by, or write to a new folder",
            )

    def settled(self, output: str) -> None:
        known = {file["path"] for file in published_files(self.path)}
        strange = [name for name in data_files(self.path) if name not in known]
        if strange and self.published(output).term == self._fenced_term:
            raise TargetForeign(
                f"something else wrote into {self.path}: {_some(sorted(strange))}",
                hint="move these files away: readers would take them for published rows",
            )

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        files = staged.files
        if self.format == "json" and files:
            files = self._as_json(staged)
        make_dirs(self.path)
        if files and os.stat(self.path).st_dev != os.stat(staged.folder).st_dev:
            files = tuple(self._copy(file, staged.tag) for file in files)
        return files

    def _as_json(self, staged: Staged) -> tuple[Committable, ...]:
        rows, folder = staged.read(), staged.scratch / "json"
        by = [name for name in rows.columns if name.startswith(BY)]
        writer = rows.write.options(**COMMITTER, **_JSON_TIMES)
        if self.roll_bytes:
            per_file = int(self.roll_bytes / max(self._json_bytes_per_row, 1.0))
            writer = writer.option("maxRecordsPerFile", max(1, per_file))
        (writer.partitionBy(*by) if by else writer).json(str(folder))
        files = describe(folder, self.by)
        rows = sum(file.rows for file in files)
        if rows:
            self._json_bytes_per_row = sum(file.bytes for file in files) / rows
        return files

    def _copy(self, file: Committable, tag: str) -> Committable:
        """Onto the target's own file system, so that publishing can rename it."""
        folder = self.path / "_staged" / tag / file.partition  # Spark's names repeat in each
        make_dirs(folder)
        copy = folder / (os.path.basename(file.path) + ".staged")
        with translate_disk_full(copy):
            shutil.copyfile(file.path, copy)
            fsync_file(copy)
            fsync_dir(folder)
        return Committable(str(copy), file.rows, file.bytes, file.crc32, file.partition)

    def sweep(self, *, below_term: int) -> None:
        for folder in (self.path / "_staged").glob("*-*-*-*"):
            if int(folder.name.rsplit("-", 2)[1]) < below_term:
                shutil.rmtree(folder, ignore_errors=True)
        LocalStore(self.path).sweep("_commits")
        log, known = self._read()
        log.prune()
        for name in log.store.list("_commits"):
            # Of a roll-up that was never finished, and that nobody can finish any more: a newer
            # one covers it. (A paused driver may yet write a roll-up that names a younger one.)
            if name.startswith("manifest-") and name not in known.manifests:
                last = int(name.removesuffix(".json").rsplit("-", 1)[1])
                if last <= known.rolled_up:
                    log.store.delete(f"_commits/{name}")

    # -------------------------------------------------------------- ledger and publish

    def published(self, output: str) -> Ledger:
        _, folder = self._read()
        return folder.ledger if folder.owner in (output, "") else Ledger()

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        log, folder = self._read()
        entry = {"type": "fence", "output": output, "term": term, "nonce": token}
        while True:
            self._refuse_other_owner(folder, output)
            if folder.token == token:
                self._fenced_term = term
                return folder.ledger
            if folder.term >= term:
                raise Fenced(
                    f"{self} has seen term {folder.term}, this driver has term {term}",
                    hint="another driver leads this job now",
                )
            log.put(folder.position + 1, entry)
            log.catch_up(folder)

    def publish(self, publication: Publication) -> Outcome:
        log, folder = self._read()
        entry = {
            "type": "epoch", "output": publication.output, "lineage": publication.lineage,
            "epoch": publication.epoch, "term": publication.term, "nonce": uuid.uuid4().hex,
            "decision": publication.decision, "rows": publication.rows,
            "schema": publication.schema, "layout": self._layout(),
            "files": [self._entry(publication, file) for file in publication.files],
        }  # fmt: skip
        while True:
            if judge(folder.ledger, publication, str(self)) is Outcome.ALREADY_PUBLISHED:
                return Outcome.ALREADY_PUBLISHED
            self._move(publication)
            reach("files.moved")
            number = folder.position + 1
            put = log.put(number, entry)
            if put is Put.LOST and (log.entry(number) or {}).get("nonce") == entry["nonce"]:
                put = Put.COVERED if log.covered(number) else Put.WON  # our answer got lost
            if put is Put.WON:
                reach("files.committed")
                self._drop_copies(publication)
                roll_up(log, folder, every=self.roll_up_every)
                return Outcome.PUBLISHED
            log.catch_up(folder)  # somebody came first: look at the ledger again

    def _move(self, publication: Publication) -> None:
        """Rename moves the only copy, so who comes second finds nothing, and looks."""
        touched = set()
        for file in publication.files:
            final = self._final(publication, file)
            with translate_disk_full(final):
                make_dirs(final.parent)
                touched.add(final.parent)
                try:
                    os.rename(file.path, final)
                except FileNotFoundError:
                    if not final.exists():
                        raise staged_file_gone(str(self), file.path, publication.epoch) from None
                    verify(file, final)
                except PermissionError as error:
                    raise PublishFailed(
                        f"cannot write into {final.parent}: {error.strerror}",
                        hint="give the driver write access and start it again",
                    ) from error
            reach("files.moved-one")
        for parent in touched:
            fsync_dir(parent)

    def _drop_copies(self, publication: Publication) -> None:
        """The folders of copies that were renamed away."""
        copies = self.path / "_staged"
        for file in publication.files:
            if Path(file.path).is_relative_to(copies):
                tag = Path(file.path).relative_to(copies).parts[0]
                shutil.rmtree(copies / tag, ignore_errors=True)

    def _final(self, publication: Publication, file: Committable) -> Path:
        name = os.path.basename(file.path).removesuffix(".staged")
        return self.path / file.partition / f"{publication.epoch:010d}-{name}"

    def _entry(self, publication: Publication, file: Committable) -> dict[str, Any]:
        path = self._final(publication, file).relative_to(self.path)
        return {"path": str(path), "rows": file.rows, "bytes": file.bytes, "crc32": file.crc32}

    # -------------------------------------------------------------- the numbered commits

    def _layout(self) -> str:
        return f"{self.format} by {', '.join(self.by)}" if self.by else self.format

    def _read(self) -> tuple[NumberedLog, Folder]:
        self._log.catch_up(self._folder)
        return self._log, self._folder

    def _refuse_other_owner(self, folder: Folder, output: str) -> None:
        if folder.owner not in (output, ""):
            raise TargetForeign(
                f"{self.path} belongs to output {folder.owner}, not to {output}",
                hint="give every output a folder of its own",
            )

    @staticmethod
    def read(spark: SparkSession, path: str | os.PathLike[str]) -> DataFrame:
        """The published rows, whole epochs only, as they are at this moment."""
        from pyspark.sql.types import StructType

        root = Path(os.path.abspath(path))
        _, folder = Files(root)._read()
        if not folder.owner:
            raise TargetForeign(f"{root} is not an output folder", hint="look at the path")
        if not folder.schema:
            raise TargetForeign(f"{root} has no published epoch yet", hint="try again later")
        schema = StructType.fromJson(json.loads(folder.schema))
        files = published_files(root)
        for file in files:
            refuse_other_size(root / file["path"], file["bytes"])
        paths = [str(root / file["path"]) for file in files]
        if not paths:
            return spark.createDataFrame([], schema)
        # The paths are files, so nothing is taken from the names of folders.
        reader = spark.read.schema(schema).options(**NO_GLOB, recursiveFileLookup="true")
        if folder.layout.startswith("json"):
            return reader.options(**_JSON_TIMES).json(paths)
        return reader.parquet(*paths)


def _refuse_maps(schema: str, target: str) -> None:
    """JSON has text for keys only, and Spark does not read them back as anything else."""
    wrong = [
        f"{name} ({kind})"
        for name, kind in columns(schema).items()
        if re.search(r"map<(?!string)", kind)
    ]
    if wrong:
        raise JobError(
            f"{target} as JSON cannot hold column {', '.join(wrong)}",
            hint="make the keys of the map strings, or write Parquet",
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
