"""The home (the state directory): where jobs, their lineages and their queries are on disk.

<home>/<job>/job.json                      the first lineage of the job
<home>/<job>/lease/                        terms and who holds them
<home>/<job>/starts/<source>.json          where the job began to read a source, if pinned
<home>/<job>/starts/<source>/<part>.json   the first facts of a part that joined the source later
<home>/<job>/lineages/<id>/lineage.json    parent, reason, Spark version, settings
<home>/<job>/lineages/<id>/<query>/        a Spark checkpoint, and in it
<home>/<job>/lineages/<id>/<query>/onceflow/log/     the epoch log
<home>/<job>/lineages/<id>/<query>/onceflow/staged/  rows that are not published yet
<home>/<job>/lineages/<id>/<query>/onceflow/keyed/   the state of keyed steps
<home>/<job>/lineages/<id>/<query>/onceflow/times.jsonl  how long the last epochs took
<home>/<job>/importing/                    a lineage that `onceflow state import` has not finished
<home>/<job>/stop/                         requests to stop, and replies: `jobs/stop_request.py`
<home>/<job>/progress.json, events.jsonl   progress and events of the job: `service/journal.py`
<home>/_boards/, _verify/                  boards and verify runs of the page: `page/`
<home>/_audit.jsonl, _refused.jsonl        actions through the page, and refused ones: `page/`
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onceflow.errors import CheckpointRefused, Damaged, JobError
from onceflow.protocol.epoch_log import Decision, EpochLog
from onceflow.spark.session import REQUIRED
from onceflow.store.names import NAME, check_name
from onceflow.store.posix import LocalStore, make_dirs, seal, unseal

DEFAULT_HOME = ".onceflow"


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Query:
    """One query of a lineage, on disk."""

    job: str
    lineage: str
    name: str
    home: Path
    folder: Path  # the Spark checkpoint

    @property
    def spark_id(self) -> str:
        """The id that Spark must have for this query: a checkpoint that was swapped has another."""
        return str(uuid.uuid5(uuid.UUID(self.lineage), self.name))

    @property
    def subject(self) -> str:
        return f"{self.job}/{self.lineage}/{self.name}"

    @property
    def staged(self) -> Path:
        return self.folder / "onceflow" / "staged"

    @property
    def ticks(self) -> Path:
        """The file with the time of the next timer; see `ticks.py`."""
        return self.folder / "onceflow" / "ticks.json"

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.folder / "onceflow")

    def epoch_log(self) -> EpochLog:
        return EpochLog(self.store, self.subject)

    def keep_for_replay(self, decision: Decision) -> None:
        """Keep an epoch of the parent lineage that is to be run again here, with its boundaries."""
        name = f"replay/{decision.epoch}.json"
        self.store.put_if_absent(name, seal("replay", self.subject, decision.to_json()))

    def to_replay(self, epoch: int) -> Decision | None:
        """The decision of an epoch that `keep_for_replay` has kept."""
        name = f"replay/{epoch}.json"
        data = self.store.read(name)
        if data is None:
            return None
        body = unseal(data, "replay", self.subject, self.store.where(name))
        return Decision.from_json(body)

    def forget_replay(self) -> None:
        """Remove the kept epochs: all of them have been run again."""
        for name in self.store.list("replay"):
            self.store.delete(f"replay/{name}")


class JobFolder:
    """The folder of one job under a home."""

    def __init__(self, home: str | os.PathLike[str], name: str) -> None:
        if "://" in str(home) and not str(home).startswith("file:"):
            raise JobError(
                f"home {str(home)!r} is not a local path",
                hint="name a local or mounted folder, as in --home /data/onceflow",
            )
        self.name = check_name("job", name)
        self.home = Path(os.path.abspath(str(home).removeprefix("file://").removeprefix("file:")))
        self.folder = self.home / name
        self.store = LocalStore(self.folder)

    def first_lineage(self) -> str | None:
        """The lineage in which the job began, or None if it never ran here."""
        body = self._job()
        return None if body is None else str(body["lineage"])

    def fork(self) -> dict[str, Any] | None:
        """The origin of a fork and its new targets; None if this job is no fork."""
        body = self._job()
        return None if body is None else body.get("fork")

    def _job(self) -> dict[str, Any] | None:
        data = self.store.read("job.json")
        if data is None:
            return None
        return unseal(data, "job", self.name, self.store.where("job.json"))

    def put_job(self, lineage: str, facts: dict[str, Any] | None = None) -> bool:
        """Create the job. Return False if it exists already."""
        body = {"lineage": lineage, "at": now(), **(facts or {})}
        return self.store.put_if_absent("job.json", seal("job", self.name, body))

    def lineage(self) -> str | None:
        """The current lineage of the job, or None if it never ran here."""
        found = self.lineages()
        return found[-1] if found else None

    def lineages(self) -> list[str]:
        """All lineages of the job, from the first to the current one."""
        found, lineage = [], self.first_lineage()
        while lineage is not None:
            found.append(lineage)
            lineage = self._child(lineage)
        return found

    def _child(self, lineage: str) -> str | None:
        """The lineage that continues where this one has ended.

        The end of its first query, by name, decides. The ends of the others are written after it,
        so any `end` entry implies that the first one exists.
        """
        ends = (query.epoch_log().read_end() for query in self.queries_of(lineage))
        return next((str(end["to"]) for end in ends if end is not None), None)

    def open_lineage(self, spark_version: str, who: str | None = None) -> str:
        """The current lineage of the job. If there is none, create the first one for `who`."""
        lineage = self.lineage()
        if lineage is None:
            if self.store.list("lineages"):
                where = self.store.where("job.json")
                raise Damaged(f"{where} is missing", hint="put it back from a backup of the home")
            make_dirs(self.folder)
            self.put_job(str(uuid.uuid4()))
            lineage = self.lineage()
            assert lineage is not None
        name = f"lineages/{lineage}/lineage.json"
        data = self.store.read(name)
        if data is None:
            if self.store.list(f"lineages/{lineage}"):
                where = self.store.where(name)
                raise Damaged(f"{where} is missing", hint="put it back from a backup of the home")
            facts = {"parent": None, "reason": "start", "at": now(), "spark": spark_version}
            self.put_lineage(lineage, {**facts, "who": who})
        else:
            self._refuse_weaker(
                unseal(data, "lineage", lineage, self.store.where(name))["settings"]
            )
        return lineage

    def put_lineage(self, lineage: str, facts: dict[str, Any]) -> None:
        """Write the origin of a lineage, with the settings that it needs."""
        body = {**facts, "settings": {name: value for name, (value, _) in REQUIRED.items()}}
        name = f"lineages/{lineage}/lineage.json"
        self.store.put_if_absent(name, seal("lineage", lineage, body))

    def about(self, lineage: str) -> dict[str, Any]:
        """The origin and the settings of a lineage."""
        name = f"lineages/{lineage}/lineage.json"
        data = self.store.read(name)
        if data is None:
            where = self.store.where(name)
            raise Damaged(f"{where} is missing", hint="put it back from a backup of the home")
        return unseal(data, "lineage", lineage, self.store.where(name))

    def pin(self, source: str, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """The position at which the first start of this job began to read a source. `make` returns
        it for the first start; None if the source is not pinned."""
        name = f"starts/{source}.json"
        data = self.store.read(name)
        if data is None:
            pin = make()
            if pin is None:
                return None
            self.store.put_if_absent(name, seal("start", source, pin))
            data = self.store.read(name)
            assert data is not None
        return unseal(data, "start", source, self.store.where(name))

    def keep(self, source: str, part: str, facts: dict[str, Any]) -> dict[str, Any]:
        """The first facts about a part that joined a source later: the kept ones, else `facts`,
        which are then kept."""
        kept = self.pin(f"{source}/{part}", lambda: facts)
        assert kept is not None
        return kept

    def put_starts(self, starts: dict[str, dict[str, Any]]) -> None:
        """Write what `starts` returned, for this job or for another."""
        for name, body in starts.items():
            self.store.put_if_absent(f"starts/{name}.json", seal("start", name, body))

    def starts(self) -> dict[str, dict[str, Any]]:
        """Everything that `pin` and `keep` have written: name -> body."""
        found = {}
        for path in sorted((self.folder / "starts").rglob("*.json")):
            name = str(path.relative_to(self.folder / "starts").with_suffix(""))
            found[name] = unseal(path.read_bytes(), "start", name, str(path))
        return found

    def _refuse_weaker(self, settings: dict[str, str]) -> None:
        weaker = [
            f"{name} was {settings.get(name)!r}, must be {value!r}: {why}"
            for name, (value, why) in REQUIRED.items()
            if settings.get(name) != value
        ]
        if weaker:
            raise CheckpointRefused(
                f"the checkpoint of job {self.name} was written with weaker settings:\n  - "
                + "\n  - ".join(weaker),
                hint="start the job under a new home; a checkpoint cannot be made safe afterwards",
            )

    def query(self, lineage: str, name: str) -> Query:
        check_name("query", name)
        folder = self.folder / "lineages" / lineage / name
        return Query(self.name, lineage, name, self.home, folder)

    def queries(self) -> list[Query]:
        """The queries of the current lineage that have started at least once."""
        lineage = self.lineage()
        return [] if lineage is None else self.queries_of(lineage)

    def queries_of(self, lineage: str) -> list[Query]:
        """The queries of a lineage that have started in it at least once, by name."""
        names = sorted(self.store.list(f"lineages/{lineage}"))
        found = (self.query(lineage, name) for name in names if NAME.fullmatch(name))
        return [query for query in found if (query.folder / "onceflow" / "log").is_dir()]


def jobs(home: str | os.PathLike[str]) -> Iterator[JobFolder]:
    root = Path(os.path.abspath(home))
    if root.is_dir():
        for folder in sorted(root.iterdir()):
            if (folder / "job.json").is_file():
                yield JobFolder(root, folder.name)


def select_jobs(home: str | os.PathLike[str], job: str | None) -> list[JobFolder]:
    """The job with that name, or all jobs."""
    found = list(jobs(home))
    if job is None:
        return found
    names = ", ".join(folder.name for folder in found)
    hint = f"there are: {names}" if names else "name the home with --home DIR"
    found = [folder for folder in found if folder.name == job]
    if not found:
        raise JobError(f"no job {job} ran under {home}", hint=hint)
    return found
