"""Rows as Parquet or JSON files in a folder, published by numbered commit entries."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.abilities import Staged
from onceflow.contract.ledger import Committable, Ledger, Position, Publication, needs_rewind
from onceflow.contract.quantities import parse_bytes
from onceflow.contract.schema import columns, refuse_difference
from onceflow.contract.staged_files import AS_WRITTEN, BY, COMMITTER, describe, refuse_long_folder
from onceflow.errors import Damaged, JobError, TargetBehind, TargetForeign
from onceflow.faults.points import reach
from onceflow.files.inventory import Inventory
from onceflow.folders.commit_log import Commit, CommitLog, FolderState
from onceflow.folders.folder import FolderSink, data_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Spark's own patterns for JSON cut a timestamp to milliseconds.
_JSON_TIMES = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


class _OutputFolder(FolderState):
    """The commits of an output folder: one output owns it.

    A commit of type "inventory" records which files are published, after a drop or if the roll-up
    of an older onceflow lacks it, and that the files of all drops before it are removed.
    """

    owner: str
    schema: str
    layout: str
    drops: list[list[int]]  # [commit, epoch]: it took back all earlier epochs above that one
    stood: dict[str, int]  # lineage -> its last epoch that was not taken back
    inventory: Inventory | None  # of the published files; None: read the commits instead

    def restarted(self, body: dict[str, Any]) -> None:
        self.owner = next(iter(self.ledgers), "")
        self.schema, self.layout = body.get("schema", ""), body.get("layout", "")
        self.drops, self.stood = list(body.get("drops", ())), dict(body.get("stood", {}))
        said = body.get("inventory") if body else Inventory().as_json()
        self.inventory = Inventory.of_json(said) if said else None

    def applied(self, number: int, entry: Commit) -> None:
        self.owner = entry.get("output") or self.owner
        if "schema" in entry:
            self.schema, self.layout = entry["schema"], entry["layout"]
        if entry["type"] == "drop":
            self.drops.append([number, entry["above"]])
            self.stood = {name: min(last, entry["above"]) for name, last in self.stood.items()}
            self.inventory = None
        if entry["type"] == "inventory":
            self.inventory = Inventory.of_json(entry["inventory"])
        if self.inventory is not None:
            self.inventory = self.inventory.plus(file["path"] for file in entry.get("files", ()))
        if entry.get("lineage"):
            self.stood[entry["lineage"]] = entry["epoch"]

    def rolled(self) -> dict[str, Any]:
        return {
            "schema": self.schema, "layout": self.layout, "drops": self.drops, "stood": self.stood,
            "inventory": self.inventory and self.inventory.as_json(),
        }  # fmt: skip

    def kept(self, number: int, entry: Commit) -> Commit:
        return {"number": number, "epoch": entry.get("epoch", -1), "files": entry["files"]}

    def stands(self, commit: Commit) -> bool:
        """Epochs are numbered through all lineages."""
        number, epoch = commit["number"], commit["epoch"]
        return not any(number < drop and epoch > above for drop, above in self.drops)


class Files(FolderSink):
    """Every row of a decided epoch is in the folder exactly once, in files that never change.

    A plain reader of the folder (`spark.read.parquet`, DuckDB) sees rows of decided epochs only,
    but during a publish perhaps a part of the newest epoch, and it takes the values of `by` columns
    from folder names, where the empty string and null are the same. `Files.read` sees whole epochs
    only, with every value as it was written.

    `by` makes sub-folders (`country=NL/`); the columns stay in the files too. `roll` is the
    approximate size at which the next file begins.
    """

    kind = "files"
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
        self._folder = _OutputFolder()
        self._commit_log = CommitLog(self.path, "output folder", self._folder)
        self._fenced_term: int | None = None
        self._json_bytes_per_row = 200.0  # measured from the first epoch on
        for name in self.by:
            if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
                raise JobError(
                    f"column {name!r} cannot name a folder",
                    hint="rename it with letters and digits",
                )

    def __str__(self) -> str:
        return f"Files({str(self.path)!r})"

    def arguments(self) -> dict[str, Any]:
        by, roll = list(self.by), f"{self.roll_bytes} B"
        return {"path": str(self.path), "format": self.format, "by": by, "roll": roll}

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
        self._commit_log.catch_up()
        folder = self._folder
        if folder.position == 0:
            strange = sorted(os.listdir(self.path)) if self.path.exists() else []
            strange = [name for name in strange if name not in ("_commits", "_manifests")]
            if strange:
                raise TargetForeign(
                    f"{self.path} holds files that no output of onceflow wrote: {_some(strange)}",
                    hint="name a new or an empty folder",
                )
            return
        self._commit_log.check_manifests()
        self._refuse_other_owner(output)
        if folder.schema:
            refuse_difference(str(self), columns(folder.schema), columns(schema))
        if folder.layout and folder.layout != self._layout():
            raise TargetForeign(
                f"{self.path} was written with {folder.layout}, now it is {self._layout()}",
                hint="keep format and by, or write to a new folder",
            )

    def settled(self, output: str) -> None:
        self._commit_log.catch_up()
        if self._folder.inventory == Inventory().plus(data_files(self.path)):
            return
        strange = self._unlisted()
        if strange and self.published(output).term == self._fenced_term:
            raise TargetForeign(
                f"something else wrote into {self.path}: {_some(sorted(strange))}",
                hint="move these files away: readers would read them as published rows",
            )

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        for name in {part for file in staged.files for part in file.partition.split("/")}:
            refuse_long_folder(name, name.partition("=")[0], str(self), self.path)
        if self.format == "json" and staged.files:
            staged = replace(staged, files=self._as_json(staged))
        return super().stage(staged)

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

    # -------------------------------------------------------------- ledger and publish

    def published(self, output: str) -> Ledger:
        found = super().published(output)
        return found if self._folder.owner in (output, "") else Ledger()

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        self._commit_log.catch_up()
        self._refuse_other_owner(output)
        found = super().fence(output, term=term, token=token)
        self._fenced_term = term
        return found

    def rewind(self, output: str, *, cut: Position, to: Position, term: int, decision: str) -> None:
        folder = self._folder

        def make() -> Commit | None:
            if not needs_rewind(folder.ledger(output), to, term=term, target=self):
                return None
            self._refuse_cut(cut)
            return {
                "type": "drop", "output": output, "term": term, "lineage": to.lineage,
                "epoch": to.epoch, "decision": decision, "above": cut.epoch,
            }  # fmt: skip

        self._commit_log.append(make)
        reach("drop.committed")
        self._take_inventory()

    def refuse_rewind(self, output: str, cut: Position) -> None:
        self._commit_log.catch_up()
        self._refuse_cut(cut)

    def _refuse_cut(self, cut: Position) -> None:
        if self._folder.stood.get(cut.lineage, -1) < cut.epoch:
            raise TargetBehind(
                f"{self} has not published epoch {cut.epoch} of that lineage, or has taken it back",
                hint="go back to an epoch whose rows are there, or bring back an older copy",
            )

    def _take_inventory(self) -> None:
        """Remove the files of rows that were taken back, and record which files are left."""
        commits, folder = _published(self.path)
        for commit in commits.published():
            if not folder.stands(commit):
                for file in commit["files"]:
                    (self.path / file["path"]).unlink(missing_ok=True)
                    reach("drop.removed-one")
        found = Inventory().plus(file["path"] for file in commits.files())

        def make() -> Commit | None:
            """None: another program committed meanwhile; the next start takes an inventory."""
            if self._folder.position != folder.position:
                return None
            return {"type": "inventory", "inventory": found.as_json()}

        self._commit_log.append(make)

    def sweep(self, *, below_term: int) -> None:
        super().sweep(below_term=below_term)
        if self._folder.inventory is None:
            self._take_inventory()

    def _final(self, publication: Publication, number: int) -> Path:
        file = publication.files[number]
        name = os.path.basename(file.path).removesuffix(".staged")
        return self.path / file.partition / f"{publication.epoch:010d}-{name}"

    def _commit(self, publication: Publication) -> Commit:
        return {
            "rows": publication.rows, "schema": publication.schema, "layout": self._layout(),
            "files": [self._entry(publication, n) for n in range(len(publication.files))],
        }  # fmt: skip

    def _listed(self) -> set[str]:
        return {file["path"] for file in published_files(self.path)}

    def tidy(self) -> None:
        self._commit_log.roll_up(every=self.roll_up_every)

    def _layout(self) -> str:
        return f"{self.format} by {', '.join(self.by)}" if self.by else self.format

    def _refuse_other_owner(self, output: str) -> None:
        if self._folder.owner not in (output, ""):
            raise TargetForeign(
                f"{self.path} belongs to output {self._folder.owner}, not to {output}",
                hint="give every output a folder of its own",
            )

    @staticmethod
    def read(spark: SparkSession, path: str | os.PathLike[str]) -> DataFrame:
        """The rows that are published at this moment, whole epochs only."""
        from pyspark.sql.types import StructType

        root = Path(os.path.abspath(path))
        commits, folder = _published(root)
        if not folder.owner:
            raise TargetForeign(f"{root} is not an output folder", hint="correct the path")
        if not folder.schema:
            raise TargetForeign(f"{root} has no published epoch yet", hint="try again later")
        schema = StructType.fromJson(json.loads(folder.schema))
        files = commits.files()
        for file in files:
            _refuse_other_size(root / file["path"], file["bytes"])
        paths = [str(root / file["path"]) for file in files]
        if not paths:
            return spark.createDataFrame([], schema)
        # The paths are files, so Spark takes no values from the names of folders.
        reader = spark.read.schema(schema).options(**AS_WRITTEN, recursiveFileLookup="true")
        if folder.layout.startswith("json"):
            return reader.options(**_JSON_TIMES).json(paths)
        return reader.parquet(*paths)


def _published(root: Path) -> tuple[CommitLog, _OutputFolder]:
    folder = _OutputFolder(keep=True)
    commits = CommitLog(root, "output folder", folder)
    commits.catch_up()
    return commits, folder


def published_files(path: Path) -> list[dict[str, Any]]:
    """All published files, oldest first."""
    return _published(path)[0].files()


def _refuse_other_size(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != size:
        says = "is missing" if found is None else f"has {found} bytes, but {size} were published"
        raise Damaged(f"{path} {says}", hint="put the file back from a backup")


def _refuse_maps(schema: str, target: str) -> None:
    """Keys in JSON are text, and Spark cannot read them back as anything else."""
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
