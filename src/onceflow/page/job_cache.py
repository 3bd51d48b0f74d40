"""The jobs of a home, read from their files. Only files that have changed are read again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onceflow.errors import JobError, OnceflowError, SetupError
from onceflow.jobs.stop_request import lock_of_waiting_run
from onceflow.page.files import Changes, JsonFile, JsonLinesFile, Row, signature
from onceflow.page.formatting import promise
from onceflow.page.graph import kind_of, links, place_of, written_to
from onceflow.page.job_events import JobEvents, progress_of_queries
from onceflow.page.query_cache import QueryCache
from onceflow.page.rates import iso, rate, seconds_since, sparkline, timestamp
from onceflow.page.shapes import (
    Job,
    JobFacts,
    JobState,
    JobSummary,
    Mark,
    OutputFacts,
    Query,
    SourceFacts,
)
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lease import Holder, Lease
from onceflow.service.journal import EVENTS, PROGRESS
from onceflow.service.number_format import age
from onceflow.snapshots.savepoints import Savepoints
from onceflow.snapshots.shapes import KeyedStep
from onceflow.store.names import NAME, check_name

_FRESH = 10.0  # seconds; if its progress is older, a driver has ended or hangs
_MARKS = 200


class JobCache:
    """One job. `read` reads what has changed; the other methods answer from memory."""

    def __init__(self, folder: JobFolder) -> None:
        self.folder = folder
        self.name = folder.name
        self.error: str | None = None
        self.events = JobEvents()
        self.queries: dict[str, QueryCache] = {}
        self._events_file = JsonLinesFile(
            folder.folder / EVENTS, self.events.take, self.events.clear
        )
        self._progress = JsonFile(folder.folder / PROGRESS)
        self._lease = Lease(folder.folder / "lease", folder.name)
        self._lease_changes = Changes(folder.folder / "lease")
        self._holder: Holder | None = None
        self._job_changes = Changes(folder.folder / "job.json")
        self._lineage: str | None = None
        self._lineage_changes: Changes | None = None
        self._savepoints: list[Mark] = []
        self._savepoints_seen: list[Any] = []
        self.is_led = False  # does a driver lead the job?
        self._waits = False

    # ------------------------------------------------------------ reading

    def read(self) -> None:
        self._events_file.read()
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
        self.is_led = self._holder is not None and self._lease.alive(self._holder)
        self._waits = not self.is_led and lock_of_waiting_run(self.folder.folder) is not None

    def _read_lineage(self) -> None:
        """The current lineage is looked up again when one of its logs was closed."""
        moved = self._job_changes.any() or any(q.has_ended for q in self.queries.values())
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
                self.queries.setdefault(query.name, QueryCache(query))

    # ------------------------------------------------------------ the driver

    @property
    def term(self) -> int:
        return self._holder.term if self._holder else 0

    @property
    def state(self) -> JobState:
        if self.error is not None:
            return "damaged"
        if self.is_led:
            return "running"
        if self._waits or self.events.is_restarting():
            return "restarting"
        return "starting" if self.events.is_starting() else "stopped"

    def progress(self) -> dict[str, Row]:
        """Query -> the last report of a driver, even if it is old."""
        return progress_of_queries(self._progress.body)

    def reported_at(self) -> str | None:
        """When a driver wrote its last report; this driver or an earlier one."""
        at = self._progress.body.get("at")
        return at if timestamp(at) is not None else None

    def is_fresh(self) -> bool:
        """Does the last report tell the present?"""
        age = seconds_since(self.reported_at())
        return self.is_led and self._is_of_leader() and age is not None and age < _FRESH

    def _is_of_leader(self) -> bool:
        """Did the driver that leads write the last report?"""
        pid = self._progress.body.get("pid")
        return self._holder is not None and pid == self._holder.pid

    def _leads(self, holder: Holder) -> str:
        """A driver that hangs still leads; only the age of its report shows it."""
        silent = seconds_since(self.reported_at() if self._is_of_leader() else holder.since)
        quiet = silent is not None and silent >= _FRESH
        but = f", but has not reported for {age(silent)}" if quiet and silent else ""
        return f"process {holder.pid} on {holder.host} leads it{but}"

    def _says(self, state: JobState) -> str:
        holder = self._holder
        match state:
            case "damaged":
                return "one of its files cannot be read"
            case "running" if holder is not None:
                return self._leads(holder)
            case "restarting":
                return f"waits for its restart: {self.events.error}"
            case "starting":
                return "its driver is starting"
        if self.events.last.get("event") in ("starting", "started", "stopping"):
            return "not running: its driver was killed"
        return f"ended by an error: {self.events.error}" if self.events.error else "not running"

    # ------------------------------------------------------------ answers

    def summary(self, now: float | None = None) -> JobSummary:
        return {**self._facts(now or time.time()), "queries": sorted(self.queries)}

    def _facts(self, now: float) -> JobFacts:
        state, holder, queries = self.state, self._holder, self.queries.values()
        progress = self.progress() if self.is_fresh() else {}
        decided = [q.last for q in queries if q.last is not None]
        newest = max((entry["at"] for entry in decided), default=None)
        if any(q.get("published_s_ago") is not None for q in progress.values()):
            since = min(q.get("published_s_ago") or 1e9 for q in progress.values())
            newest = iso((timestamp(self.reported_at()) or now) - since)
        outputs = {
            f"{q.name}/{name}": target.get("guarantee")
            for q in queries
            for name, target in q.outputs.items()
        }
        guarantee, guarantee_says = promise(outputs)
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
            "published_s_ago": seconds_since(newest, now),
            "term": self.term,
            "leader": {"pid": holder.pid, "host": holder.host, "since": holder.since}
            if holder and self.is_led
            else None,
            "restarts": self.events.restarts,
            "error": self.error or (None if state == "running" else self.events.error),
            "sparkline": sparkline((q.published() for q in queries), now),
        }

    @staticmethod
    def _rate_in(query: QueryCache, progress: dict[str, Row], now: float) -> float:
        found = progress.get(query.name, {}).get("rows_in_per_s")
        return float(found) if found is not None else rate(query.rows_in(), now)

    def details(self, others: list[JobCache], now: float | None = None) -> Job:
        now = now or time.time()
        fresh, progress = self.is_fresh(), self.progress()
        return {
            **self._facts(now),
            "lineage": self._lineage,
            "queries": [
                self._query(q, progress.get(name, {}), fresh, now)
                for name, q in sorted(self.queries.items())
            ],
            "marks": self._marks(),
            "links": links(self, others),
        }

    def _query(self, query: QueryCache, progress: Row, fresh: bool, now: float) -> Query:
        last = query.last
        rows, size = query.state()
        rate_in = self._rate_in(query, {query.name: progress} if fresh else {}, now)
        watermark = query.watermark()
        return {
            "query": query.name,
            "epoch": last["epoch"] if last else None,
            "decided": last["at"] if last else None,
            "rows": query.epochs[-1].rows if last else 0,
            "rows_in_per_s": rate_in,
            "rows_out_per_s": rate(query.published(), now),
            "lag_s": progress.get("lag_s") if fresh else None,
            "watermark": None if watermark is None else _time(watermark),
            "late_rows": progress.get("late_rows", sum(e.late for e in query.epochs)),
            "rejected_rows": progress.get("rejected_rows"),
            "state_rows": rows,
            "state_bytes": size,
            "sources": self._sources(query, rate_in, now),
            "outputs": self._outputs(query, progress.get("outputs") or {}, now),
            "percentiles": query.percentiles(),
            "steps": query.steps(),
            "keyed": [_keyed(*step) for step in (last or {}).get("keyed", {}).items()],
        }

    @staticmethod
    def _sources(query: QueryCache, rate_in: float, now: float) -> list[SourceFacts]:
        def rate_from(source: str) -> float | None:
            if len(query.sources) == 1:
                return rate_in
            found = query.read_from(source)
            return None if found is None else rate(found, now)

        return [
            {
                "source": name,
                "kind": kind_of(facts),
                "place": place_of(facts),
                "end": (query.last or {}).get("end", {}).get(name),
                "rows_per_s": rate_from(name),
            }
            for name, facts in query.sources.items()
        ]

    @staticmethod
    def _outputs(query: QueryCache, totals: Row, now: float) -> list[OutputFacts]:
        return [
            {
                "output": name,
                "kind": kind_of(target),
                "target": place_of(target),
                "place": written_to(target),
                "guarantee": target.get("guarantee"),
                "rows_per_s": rate(query.published(name), now),
                "rows": query.epochs[-1].outputs.get(name, 0) if query.last else 0,
                "rows_total": totals.get(name),
            }
            for name, target in query.outputs.items()
        ]

    def _marks(self) -> list[Mark]:
        # The manifest of a savepoint is written last, so the folder's time does not show it.
        savepoints = Savepoints(self.folder)
        try:
            names = savepoints.names()
        except OSError:  # `error` tells that the folder cannot be read
            names = []
        seen = [(name, signature(savepoints.manifest(name))[0]) for name in names]
        if seen != self._savepoints_seen:
            self._savepoints_seen = seen
            self._savepoints = [
                {
                    "at": found.body["at"],
                    "kind": "savepoint",
                    "says": f"savepoint {name}",
                    "savepoint": name,
                }
                for name, found in savepoints.all()
                if not isinstance(found, OnceflowError)
            ]
        marks = [*self.events.marks, *self._savepoints]
        return sorted(marks, key=lambda mark: str(mark["at"]))[-_MARKS:]


class HomeCache:
    """All jobs of a home. Not for several threads at once."""

    def __init__(self, home: str | os.PathLike[str]) -> None:
        self.home = Path(os.path.abspath(home))
        self._jobs: dict[str, JobCache] = {}

    def read(self) -> None:
        """`SetupError`: the home exists and cannot be listed."""
        there = dict(self._folders())
        for name in self._jobs.keys() - there.keys():
            del self._jobs[name]
        for name, folder in there.items():
            if name not in self._jobs:
                self._jobs[name] = JobCache(folder)
            self._jobs[name].read()

    def _folders(self) -> Iterator[tuple[str, JobFolder]]:
        """The folders of jobs: also of a job that starts for the first time and has only a journal,
        and folders that cannot be read, which may be jobs."""
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
            if _may_be_job(self.home / entry):
                yield entry, JobFolder(self.home, entry)

    @property
    def jobs(self) -> list[JobCache]:
        """The jobs that ran or are about to run, by name."""
        known = (self._jobs[name] for name in sorted(self._jobs))
        return [job for job in known if job.queries or job.state != "stopped" or job.events.last]

    def __contains__(self, name: str) -> bool:
        return name in self._jobs

    def job(self, name: str) -> JobCache:
        """`JobError` with the names of all jobs if there is none of that name."""
        check_name("job", name)
        found = self._jobs.get(name)
        if found is None:
            names = ", ".join(sorted(self._jobs))
            raise JobError(
                f"no job {name} ran under {self.home}",
                hint=f"there are: {names}" if names else "run one: onceflow run JOB.py",
            )
        return found


def _may_be_job(folder: Path) -> bool:
    try:
        return any((folder / file).is_file() for file in ("job.json", EVENTS))
    except OSError:
        return True


def _keyed(step: str, stood: Row) -> KeyedStep:
    watermark = stood["watermark"]
    return {
        "step": step,
        "rows": stood["rows"],
        "late": stood["late"],
        "fired": stood["fired"],
        "groups": stood["groups"],
        "watermark_ms": None if watermark is None else watermark // 1000,
    }


def _time(milliseconds: Any) -> str:
    try:
        return iso(milliseconds / 1000)
    except (ValueError, OverflowError, OSError):  # Spark knows years that Python does not
        return f"{milliseconds} ms"
