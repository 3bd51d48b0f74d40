"""The home: where jobs, their lineages and their queries live on disk.

<home>/<job>/job.json                      the first lineage of the job
<home>/<job>/lease/                        terms and who holds them
<home>/<job>/starts/<source>.json          where a source began, if that was not its beginning
<home>/<job>/starts/<source>/<part>.json   what was first known of a part that joined it later
<home>/<job>/lineages/<id>/lineage.json    parent, reason, Spark version, settings
<home>/<job>/lineages/<id>/<query>/        a Spark checkpoint, and in it
<home>/<job>/lineages/<id>/<query>/onceflow/log/     the epoch log
<home>/<job>/lineages/<id>/<query>/onceflow/staged/  rows that are not published yet
<home>/<job>/lineages/<id>/<query>/onceflow/keyed/   the state of keyed steps
<home>/<job>/lineages/<id>/<query>/onceflow/times.jsonl  how long the last epochs took
<home>/<job>/importing/                    what `onceflow state import` makes, until it is a lineage
<home>/<job>/stop/                         who is asked to stop, and has: `runtime/stopping.py`
<home>/<job>/progress.json, events.jsonl   for whoever looks: `runtime/journal.py`
<home>/_boards/, _verify/                  what the page shows beside jobs: `web/`
<home>/_audit.jsonl, _refused.jsonl        who did what through it, and who may not: `web/access.py`
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
        """The id that Spark keeps for it: a checkpoint that was swapped has another."""
        return str(uuid.uuid5(uuid.UUID(self.lineage), self.name))

    @property
    def subject(self) -> str:
        return f"{self.job}/{self.lineage}/{self.name}"

    @property
    def staged(self) -> Path:
        return self.folder / "onceflow" / "staged"

    @property
    def ticks(self) -> Path:
        """Says when something is due, if no rows come."""
        return self.folder / "onceflow" / "ticks.json"

    @property
    def store(self) -> LocalStore:
        return LocalStore(self.folder / "onceflow")

    def epoch_log(self) -> EpochLog:
        return EpochLog(self.store, self.subject)

    def keep_for_replay(self, decision: Decision) -> None:
        """An epoch of the lineage before that is to be run again here, with its boundaries."""
        name = f"replay/{decision.epoch}.json"
        self.store.put_if_absent(name, seal("replay", self.subject, decision.to_json()))

    def to_replay(self, epoch: int) -> Decision | None:
        name = f"replay/{epoch}.json"
        data = self.store.read(name)
        if data is None:
            return None
        body = unseal(data, "replay", self.subject, self.store.where(name))
        return Decision.from_json(body)

    def forget_replay(self) -> None:
        """All of it has been run again."""
        for name in self.store.list("replay"):
            self.store.delete(f"replay/{name}")


class JobFolder:
    """The folder of one job under a home."""

    def __init__(self, home: str | os.PathLike[str], name: str) -> None:
        if "://" in str(home) and not str(home).startswith("file:"):
            raise JobError(
                f"home {str(home)!r} is not a local path", hint="name a folder that is mounted here"
            )
        self.name = check_name("job", name)
        self.home = Path(os.path.abspath(str(home).removeprefix("file://").removeprefix("file:")))
        self.folder = self.home / name
        self.store = LocalStore(self.folder)

    def first_lineage(self) -> str | None:
        """The one that the job began in, or None if it never ran here."""
        body = self._job()
        return None if body is None else str(body["lineage"])

    def fork(self) -> dict[str, Any] | None:
        """What this job is a fork of, and where its outputs go; None if it is not one."""
        body = self._job()
        return None if body is None else body.get("fork")

    def _job(self) -> dict[str, Any] | None:
        data = self.store.read("job.json")
        if data is None:
            return None
        return unseal(data, "job", self.name, self.store.where("job.json"))

    def put_job(self, lineage: str, facts: dict[str, Any] | None = None) -> bool:
        """From here on the job is there. False: it was before."""
        body = {"lineage": lineage, "at": now(), **(facts or {})}
        return self.store.put_if_absent("job.json", seal("job", self.name, body))

    def lineage(self) -> str | None:
        """The lineage that the job is in, or None if it never ran here."""
        found = self.lineages()
        return found[-1] if found else None

    def lineages(self) -> list[str]:
        """From the first to the one that the job is in."""
        found, lineage = [], self.first_lineage()
        while lineage is not None:
            found.append(lineage)
            lineage = self._child(lineage)
        return found

    def _child(self, lineage: str) -> str | None:
        """The lineage that goes on where this one has ended. The end of its first query, by name,
        decides; those of the others follow, so each of them says that the first is there."""
        ends = (query.epoch_log().closed() for query in self.queries_of(lineage))
        return next((str(end["to"]) for end in ends if end is not None), None)

    def open_lineage(self, spark_version: str, who: str | None = None) -> str:
        """The lineage that the job is in. If there is none, `who` opens the first one."""
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
        """Say where a lineage comes from."""
        body = {**facts, "settings": {name: value for name, (value, _) in REQUIRED.items()}}
        name = f"lineages/{lineage}/lineage.json"
        self.store.put_if_absent(name, seal("lineage", lineage, body))

    def about(self, lineage: str) -> dict[str, Any]:
        """Where a lineage comes from."""
        name = f"lineages/{lineage}/lineage.json"
        data = self.store.read(name)
        if data is None:
            where = self.store.where(name)
            raise Damaged(f"{where} is missing", hint="put it back from a backup of the home")
        return unseal(data, "lineage", lineage, self.store.where(name))

    def pin(self, source: str, make: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        """Where the first start of this job found the beginning of a source, if it was pinned."""
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
        """What was first known of a part that joined a source later: `facts`, if nothing was."""
        kept = self.pin(f"{source}/{part}", lambda: facts)
        assert kept is not None
        return kept

    def put_starts(self, starts: dict[str, dict[str, Any]]) -> None:
        """What `starts` gave, of this job or of another."""
        for name, body in starts.items():
            self.store.put_if_absent(f"starts/{name}.json", seal("start", name, body))

    def starts(self) -> dict[str, dict[str, Any]]:
        """All that `pin` and `keep` have put: name -> body."""
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
                f"the checkpoint of job {self.name} was made with weaker settings:\n  - "
                + "\n  - ".join(weaker),
                hint="start the job under a new home; a checkpoint cannot be made safe afterwards",
            )

    def query(self, lineage: str, name: str) -> Query:
        check_name("query", name)
        folder = self.folder / "lineages" / lineage / name
        return Query(self.name, lineage, name, self.home, folder)

    def queries(self) -> list[Query]:
        """The queries of the current lineage that ever started."""
        lineage = self.lineage()
        return [] if lineage is None else self.queries_of(lineage)

    def queries_of(self, lineage: str) -> list[Query]:
        """The queries of a lineage that ever started in it, by name."""
        names = sorted(self.store.list(f"lineages/{lineage}"))
        found = (self.query(lineage, name) for name in names if NAME.fullmatch(name))
        return [query for query in found if (query.folder / "onceflow" / "log").is_dir()]


def jobs(home: str | os.PathLike[str]) -> Iterator[JobFolder]:
    root = Path(os.path.abspath(home))
    if root.is_dir():
        for folder in sorted(root.iterdir()):
            if (folder / "job.json").is_file():
                yield JobFolder(root, folder.name)


def chosen(home: str | os.PathLike[str], job: str | None) -> list[JobFolder]:
    """The job with that name, or all."""
    found = list(jobs(home))
    if job is None:
        return found
    names = ", ".join(folder.name for folder in found)
    hint = f"there are: {names}" if names else "name the home with --home DIR"
    found = [folder for folder in found if folder.name == job]
    if not found:
        raise JobError(f"no job {job} ran under {home}", hint=hint)
    return found
