"""One savepoint: read it, and check whether a job could start from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from onceflow.errors import CheckpointRefused, Damaged, JobError
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.holds import MANIFEST
from onceflow.snapshots.cut import Cut, refuse_incomplete, sha256
from onceflow.spark.versions import SUPPORTED
from onceflow.store.posix import unseal

FORMAT = 1  # of the manifest
_COPY = "restore it from a copy of the savepoint, or use another savepoint"


@dataclass(frozen=True)
class Savepoint:
    """One savepoint, wherever its folder is now."""

    folder: Path
    body: dict[str, Any]

    @classmethod
    def at(cls, folder: Path) -> Savepoint:
        path = folder / MANIFEST
        if not path.is_file():
            raise JobError(
                f"{folder} is not a savepoint: it has no {MANIFEST}",
                hint="name a savepoint of the job, or the folder that one was moved to",
            )
        body = unseal(path.read_bytes(), "savepoint", None, str(path))
        refuse_unknown(body, str(path))
        return cls(folder, body)

    @property
    def name(self) -> str:
        return str(self.body["name"])

    @property
    def number(self) -> int:
        """Its place among the savepoints of the job; 0 if it was made before there were numbers."""
        return int(self.body.get("number", 0))

    @property
    def identity(self) -> dict[str, str]:
        """What a lineage records that was restored from it."""
        return {"name": self.name, "id": str(self.body["folder"])}

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for _, entry in self.paths())

    def paths(self) -> Iterator[tuple[Path, dict[str, Any]]]:
        for query, part in self.body["queries"].items():
            for entry in part["files"]:
                yield self.folder / self.body["folder"] / query / entry["path"], entry

    def cuts(self) -> dict[str, tuple[str, Cut]]:
        """Query -> the lineage of its cut, and the cut."""
        found = {}
        for query, part in self.body["queries"].items():
            root = self.folder / self.body["folder"] / query
            files = {entry["path"]: root / entry["path"] for entry in part["files"]}
            decisions = [Decision.from_json(decision) for decision in part["decisions"]]
            found[query] = (str(self.body["lineage"]), Cut(decisions, part["sources"], files))
        return found

    def refuse_other_job(self, job: str) -> None:
        if self.body["job"] != job:
            raise JobError(
                f"{self.folder} is a savepoint of job {self.body['job']}, not of {job}",
                hint="name that job: its targets identify it by its name",
            )

    def verify(self) -> None:
        """Check every byte of every file, and that a job could start from them here. If not:
        `Damaged` or `CheckpointRefused`."""
        refuse_other_spark(self.body.get("spark"), f"savepoint {self.name!r}")
        for path, entry in self.paths():
            if not path.is_file():
                raise Damaged(f"{path} is missing", hint=_COPY)
            if path.stat().st_size != entry["bytes"] or sha256(path) != entry["sha256"]:
                raise Damaged(f"{path} has changed since the savepoint was made", hint=_COPY)
        for query, part in self.body["queries"].items():
            refuse_incomplete(self.folder / self.body["folder"] / query, part)


def refuse_unknown(body: dict[str, Any], where: str) -> None:
    """Refuse the format of a newer onceflow."""
    found = body.get("format")
    if found != FORMAT:
        raise Damaged(
            f"{where} is a savepoint of format {found}, by onceflow {body.get('onceflow')}; this "
            f"onceflow knows format {FORMAT}",
            hint="use the onceflow that made it, or a newer one",
        )


def refuse_other_spark(made: str | None, what: str) -> None:
    """Refuse state of another minor version of Spark, which cannot read it."""
    here, known = installed_spark(), ", ".join(f"{a}.{b}" for a, b in SUPPORTED)
    if made is None:
        return
    if _minor(made) not in SUPPORTED:
        raise CheckpointRefused(
            f"{what} was made by Spark {made}; this onceflow knows {known}",
            hint="take another savepoint",
        )
    if here is not None and _minor(here) != _minor(made):
        minor = ".".join(map(str, _minor(made)))
        raise CheckpointRefused(
            f"{what} was made by Spark {made}, and this is Spark {here}: only the minor "
            "version of Spark that made a savepoint can read it",
            hint=f"restore it with Spark {minor}: pip install 'pyspark=={minor}.*'",
        )


def installed_spark() -> str | None:
    try:
        return version("pyspark")
    except PackageNotFoundError:
        return None


def _minor(spark: str) -> tuple[int, ...]:
    return tuple(int(part) for part in spark.split(".")[:2] if part.isdecimal())
