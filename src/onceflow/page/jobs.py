"""The jobs of a home, followed: whatever is asked, only what has changed is read again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onceflow.errors import JobError, OnceflowError, SetupError
from onceflow.jobs.stop_request import waiting
from onceflow.page.files import Changes, Document, Lines, Row, signature
from onceflow.page.followed import FollowedQuery
from onceflow.page.guarantees import guarantee_of
from onceflow.page.places import kind_of, links, place_of
from onceflow.page.progress import of_queries
from onceflow.page.story import Story
from onceflow.page.times import ago, iso, rate, seconds, sparkline
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lease import Holder, Lease
from onceflow.service.journal import EVENTS, PROGRESS
from onceflow.service.units import age
from onceflow.snapshots.savepoints import Savepoints
from onceflow.store.names import NAME, check_name

_FRESH = 10.0  # seconds; older progress is of a driver that is gone or hangs
_MARKS = 200


class FollowedJob:
    """One job. `read`, then ask."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        self.name = folder.name
        self.error: str | None = None
        self.story = Story()
        self.queries: dict[str, FollowedQuery] = {}
        self._events = Lines(folder.folder / EVENTS, self.story.take, self.story.clear)
        self._progress = Document(folder.folder / PROGRESS)
        self._lease = Lease(folder.folder / "lease", folder.name)
        self._lease_changes = Changes(folder.folder / "lease")
        self._holder: Holder | None = None
        self._job_changes = Changes(folder.folder / "job.json")
        self._lineage: str | None = None
        self._lineage_changes: Changes | None = None
        self._savepoints: list[Row] = []
        self._savepoints_seen: list[Any] = []
        self._alive = self._waits = False

    # ------------------------------------------------------------ reading

    def read(self) -> None:
        self._events.read()
        self._progress.read()
        try:
            self._read_lease()
            self._read_lineage()
            self.error = None
        except (OnceflowError, OSError, KeyError, TypeError, ValueError) as error:
            self.error = str(error)
        for query in self.queries.values():
            query.read()
            if query.error is not None:
                self.error = str(query.error)

    def _read_lease(self) -> None:
        if self._lease_changes.any():
            try:
                self._holder = self._lease.holder()
            except BaseException:
                self._lease_changes.forget()
                raise
        self._alive = self._holder is not None and self._lease.alive(self._holder)
        self._waits = not self._alive and waiting(self.folder.folder) is not None

    def _read_lineage(self) -> None:
        """Which lineage it is in is asked again when one of its logs has been closed."""
        moved = self._job_changes.any() or any(q.ended for q in self.queries.values())
        if moved or self._lineage is None:
            lineage = self.folder.lineage()
            if lineage != self._lineage:
                self._lineage, self.queries, self._lineage_changes = lineage, {}, None
        if self._lineage is None:
            return
        if self._lineage_changes is None:
            self._lineage_changes = Changes(self.folder.folder / "lineages" / self._lineage)
        if self._lineage_changes.any() or len(self.queries) == 0:
            for query in self.folder.queries_of(self._lineage):
                self.queries.setdefault(query.name, FollowedQuery(query))

    # ------------------------------------------------------------ telling

    @property
    def leads(self) -> bool:
        """Is there a driver that does?"""
        return self._alive

    @property
    def term(self) -> int:
        return self._holder.term if self._holder else 0

    @property
    def state(self) -> str:
        if self.error is not None:
            return "damaged"
        if self._alive:
            return "running"
        if self._waits or self.story.restarting():
            return "restarting"
        return "starting" if self.story.starting() else "stopped"

    def progress(self) -> dict[str, Row]:
        """Query -> what the driver said of it last, also if that was long ago."""
        return of_queries(self._progress.body)

    def heard(self) -> str | None:
        """When a driver said something last, this one or one before."""
        at = (self._progress.body or {}).get("at")
        return at if seconds(at) is not None else None

    def fresh(self) -> bool:
        """Does what was said last still count?"""
        age = ago(self.heard())
        return self._alive and self._ours() and age is not None and age < _FRESH

    def _ours(self) -> bool:
        """Is it of the driver that leads?"""
        told_by = (self._progress.body or {}).get("pid")
        return self._holder is not None and told_by == self._holder.pid

    def _leads(self, holder: Holder) -> str:
        """It may hang: whether it does, only its silence says."""
        silent = ago(self.heard() if self._ours() else holder.since)
        quiet = silent is not None and silent >= _FRESH
        but = f", but has said nothing for {age(silent)}" if quiet and silent else ""
        return f"process {holder.pid} on {holder.host} leads it{but}"

    def _says(self, state: str) -> str:
        holder = self._holder
        match state:
            case "damaged":
                return "a file of it cannot be read"
            case "running" if holder is not None:
                return self._leads(holder)
            case "restarting":
                return f"waits to be started again: {self.story.error}"
            case "starting":
                return "its driver is starting"
        if self.story.last.get("event") in ("starting", "started", "stopping"):
            return "not running: its driver was killed"
        return f"ended by an error: {self.story.error}" if self.story.error else "not running"

    def summary(self, now: float | None = None) -> Row:
        now = now or time.time()
        state, holder, queries = self.state, self._holder, self.queries.values()
        progress = self.progress() if self.fresh() else {}
        decided = [q.last for q in queries if q.last is not None]
        newest = max((entry["at"] for entry in decided), default=None)
        if any(q.get("published_s_ago") is not None for q in progress.values()):
            body = self._progress.body or {}
            since = min(q.get("published_s_ago") or 1e9 for q in progress.values())
            newest = iso((seconds(body.get("at")) or now) - since)
        outputs = {
            f"{q.name}/{name}": target.get("guarantee")
            for q in queries
            for name, target in q.outputs.items()
        }
        guarantee, guarantee_says = guarantee_of(outputs)
        lags = [q["lag_s"] for q in progress.values() if q.get("lag_s") is not None]
        rates_in = [self._rate_in(q, progress, now) for q in queries]
        return {
            "job": self.name,
            "state": state,
            "says": self._says(state),
            "guarantee": guarantee,
            "guarantee_says": guarantee_says,
            "lag_s": max(lags) if lags else None,
            "rows_in_per_s": round(sum(rates_in), 1),
            "rows_out_per_s": round(sum(rate(q.published(), now) for q in queries), 1),
            "epoch": max((entry["epoch"] for entry in decided), default=None),
            "published_at": newest,
            "published_s_ago": ago(newest, now),
            "term": self.term,
            "leader": {"pid": holder.pid, "host": holder.host, "since": holder.since}
            if holder and self._alive
            else None,
            "restarts": self.story.restarts,
            "error": self.error or (None if state == "running" else self.story.error),
            "queries": sorted(self.queries),
            "sparkline": sparkline((q.published() for q in queries), now),
        }

    @staticmethod
    def _rate_in(query: FollowedQuery, progress: dict[str, Row], now: float) -> float:
        found = progress.get(query.name, {}).get("rows_in_per_s")
        return float(found) if found is not None else rate(query.rows_in(), now)

    def details(self, others: list[FollowedJob], now: float | None = None) -> Row:
        now = now or time.time()
        fresh, told = self.fresh(), self.progress()
        return {
            **self.summary(now),
            "lineage": self._lineage,
            "queries": [
                self._query(q, told.get(name, {}), fresh, now)
                for name, q in sorted(self.queries.items())
            ],
            "marks": self._marks(),
            "links": links(self, others),
        }

    def _query(self, query: FollowedQuery, told: Row, fresh: bool, now: float) -> Row:
        last = query.last
        rows, size = query.state()
        rate_in = self._rate_in(query, {query.name: told} if fresh else {}, now)
        watermark = query.watermark()
        return {
            "query": query.name,
            "epoch": last["epoch"] if last else None,
            "decided": last["at"] if last else None,
            "rows": query.epochs[-1].rows if last else 0,
            "rows_in_per_s": rate_in,
            "rows_out_per_s": rate(query.published(), now),
            "lag_s": told.get("lag_s") if fresh else None,
            "watermark": None if watermark is None else _time(watermark),
            "late_rows": told.get("late_rows", sum(e.late for e in query.epochs)),
            "rejected_rows": told.get("rejected_rows"),
            "state_rows": rows,
            "state_bytes": size,
            "sources": [
                {
                    "source": name, "kind": kind_of(facts), "place": place_of(facts),
                    "end": (last or {}).get("end", {}).get(name),
                    "rows_per_s": self._rate_from(query, name, rate_in, now),
                }
                for name, facts in query.sources.items()
            ],
            "outputs": [
                {
                    "output": name, "kind": kind_of(target), "target": place_of(target),
                    "guarantee": target.get("guarantee"),
                    "rows_per_s": rate(query.published(name), now),
                    "rows": query.epochs[-1].outputs.get(name, 0) if last else 0,
                    "rows_total": (told.get("outputs") or {}).get(name),
                }
                for name, target in query.outputs.items()
            ],
            "percentiles": query.percentiles(),
            "steps": query.steps(),
            "keyed": [
                {
                    "step": step, "rows": stood["rows"], "late": stood["late"],
                    "fired": stood["fired"], "groups": stood["groups"],
                    "watermark_ms": None
                    if stood["watermark"] is None
                    else stood["watermark"] // 1000,
                }
                for step, stood in (last or {}).get("keyed", {}).items()
            ],
        }  # fmt: skip

    @staticmethod
    def _rate_from(query: FollowedQuery, source: str, of_all: float, now: float) -> float | None:
        if len(query.sources) == 1:
            return of_all
        found = query.read_from(source)
        return None if found is None else rate(found, now)

    def _marks(self) -> list[Row]:
        # A savepoint is one when its manifest is there, which the folder above does not show.
        savepoints = Savepoints(self.folder)
        try:
            names = savepoints.names()
        except OSError:  # `error` says that the folder cannot be looked into
            names = []
        there = [(name, signature(savepoints.manifest(name))[0]) for name in names]
        if there != self._savepoints_seen:
            self._savepoints_seen = there
            self._savepoints = [
                {
                    "at": found.body["at"], "kind": "savepoint", "says": f"savepoint {name}",
                    "savepoint": name,
                }
                for name, found in savepoints.all()
                if not isinstance(found, OnceflowError)
            ]  # fmt: skip
        marks = [*self.story.marks, *self._savepoints]
        return sorted(marks, key=lambda mark: str(mark["at"]))[-_MARKS:]


class FollowedHome:
    """All jobs of a home. Not for several threads at once."""

    def __init__(self, home: str | os.PathLike[str]) -> None:
        self.home = Path(os.path.abspath(home))
        self._jobs: dict[str, FollowedJob] = {}

    def read(self) -> None:
        """`SetupError`: the home is there and cannot be listed."""
        there = dict(self._folders())
        for name in self._jobs.keys() - there.keys():
            del self._jobs[name]
        for name, folder in there.items():
            if name not in self._jobs:
                self._jobs[name] = FollowedJob(folder)
            self._jobs[name].read()

    def _folders(self) -> Iterator[tuple[str, JobFolder]]:
        """Also a job that starts for the first time, and has nothing but a journal yet; and a
        folder that cannot be looked into: it may be one."""
        try:
            entries = sorted(os.listdir(self.home))
        except FileNotFoundError:
            return
        except OSError as error:
            raise SetupError(
                f"the home {self.home} cannot be listed: {error.strerror}",
                hint="let the user of the page read it, or name another --home",
            ) from error
        for entry in filter(NAME.fullmatch, entries):
            if _is_job(self.home / entry):
                yield entry, JobFolder(self.home, entry)

    @property
    def jobs(self) -> list[FollowedJob]:
        """Those that ran, or are about to; by name."""
        known = (self._jobs[name] for name in sorted(self._jobs))
        return [job for job in known if job.queries or job.state != "stopped" or job.story.last]

    def __contains__(self, name: str) -> bool:
        return name in self._jobs

    def job(self, name: str) -> FollowedJob:
        """`JobError` with those that there are."""
        check_name("job", name)
        found = self._jobs.get(name)
        if found is None:
            names = ", ".join(sorted(self._jobs))
            raise JobError(
                f"no job {name} ran under {self.home}",
                hint=f"there are: {names}" if names else "run one: onceflow run JOB.py",
            )
        return found


def _is_job(folder: Path) -> bool:
    try:
        return any((folder / file).is_file() for file in ("job.json", EVENTS))
    except OSError:
        return True


def _time(milliseconds: Any) -> str:
    try:
        return iso(milliseconds / 1000)
    except (ValueError, OverflowError, OSError):  # Spark knows years that Python does not
        return f"{milliseconds} ms"
