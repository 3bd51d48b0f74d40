"""The built-in jobs as the checker knows them: their targets and their expected results.

Plain Python computes the expected results, row by row, from the rows that were appended. Nothing of
them comes from Spark or from onceflow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from onceflow.harness.servers import Servers
from onceflow.harness.targets import Row, Target
from onceflow.harness.workload import BEGIN, DELAY, WINDOW
from onceflow.harness.workload import Row as Input

FILE = Path(__file__).with_name("builtin_jobs.py")
SINKS = ("files", "sqlite", "log")
SERVER_SINKS = ("kafka", "postgres")
SEVERAL = {"all": SINKS, "servers": ("files", "kafka", "postgres")}  # outputs decided together
_FAULTS_A_CASE = 5


@dataclass(frozen=True)
class Expected:
    """The rows that an output must hold in the end, and those that it may show before."""

    rows: Counter[Row]
    versions: frozenset[Row] | None = None  # update mode: every row that a reader may see
    total: Row | None = None  # the sums of its columns are known, its rows are not


@dataclass(frozen=True)
class BuiltInJob:
    """A job of `builtin_jobs.py`."""

    name: str
    sinks: tuple[str, ...]
    expected: Callable[[Iterable[Input], str], dict[str, Expected]]  # of rows, with these sinks
    mode: str = "append"
    key: tuple[str, ...] = ()
    in_order: str = ""  # a column that grows within a key, epoch behind epoch
    sources: tuple[str, ...] = ("rows",)
    topic: bool = False  # it reads a Kafka topic
    keyed: bool = False  # it has keyed steps
    repeats: bool = True  # an epoch that is run again has the same rows

    def targets(
        self, sinks: str, folder: Path, servers: Servers | None = None, place: str = ""
    ) -> list[Target]:
        """`place`: the name of the case on the `servers`."""

        def target(output: str, kind: str) -> Target:
            path, table = str(folder / "out" / kind), ""
            if kind == "sqlite":
                path, table = str(folder / "out" / "out.db"), "result"
            elif servers is not None and kind in SERVER_SINKS:
                path, table = servers.where(kind, place)
            return Target(f"result/{output}", kind, path, table, self.key, self.mode)

        if sinks in SEVERAL:
            return [target(name, name) for name in SEVERAL[sinks]]
        return [target("result", sinks)]

    def servers(self, sinks: str) -> set[str]:
        """The kinds of servers that the job needs with these sinks."""
        found = {*SEVERAL.get(sinks, (sinks,))} & {*SERVER_SINKS}
        return found | {"kafka"} if self.topic else found

    def expected_results(self, rows: Iterable[Input], sinks: str) -> dict[str, Expected]:
        """By query/output."""
        return {
            f"result/{output}": expected for output, expected in self.expected(rows, sinks).items()
        }


# ---------------------------------------------------------------- expected results


def _echo(rows: Iterable[Input], _: str) -> dict[str, Expected]:
    return {"result": Expected(Counter((r.number, r.id, r.key, r.value) for r in rows))}


def _sum(rows: Iterable[Input], _: str) -> dict[str, Expected]:
    counts: dict[str, int] = defaultdict(int)
    totals: dict[str, int] = defaultdict(int)
    versions = set()
    for r in rows:
        counts[r.key] += 1
        totals[r.key] += r.value
        versions.add((r.key, counts[r.key], totals[r.key]))
    last: Counter[Row] = Counter((key, counts[key], totals[key]) for key in counts)
    return {"result": Expected(last, frozenset(versions))}


def _windows(rows: Iterable[Input], _: str) -> dict[str, Expected]:
    counts: dict[tuple[int, str], int] = defaultdict(int)
    totals: dict[tuple[int, str], int] = defaultdict(int)
    newest = BEGIN
    for r in rows:
        newest = max(newest, r.at)
        cell = (_begin(r.at), r.key)
        counts[cell] += 1
        totals[cell] += r.value
    closed = _millis(newest - DELAY)
    return {
        "result": Expected(
            Counter(
                (begin, key, count, totals[begin, key])
                for (begin, key), count in counts.items()
                if begin + _length() <= closed
            )
        )
    }


def _distinct(rows: Iterable[Input], _: str) -> dict[str, Expected]:
    return {"result": Expected(Counter({(r.id, r.key, r.value) for r in rows}))}


def _join(rows: Iterable[Input], _: str) -> dict[str, Expected]:
    first: dict[int, int] = {}
    pairs: Counter[Row] = Counter()
    for r in rows:
        if not r.again:
            first[r.id] = r.number
        else:
            pairs[r.id, r.key, first[r.id], r.number] += 1
    return {"result": Expected(pairs)}


def _several(rows: Iterable[Input], sinks: str) -> dict[str, Expected]:
    found: dict[str, Counter[Row]] = {name: Counter() for name in SEVERAL[sinks]}
    for r in rows:
        name = SEVERAL[sinks][r.number % 3]
        found[name][r.number, r.id, r.key, r.value, name] += 1
    return {name: Expected(rows) for name, rows in found.items()}


def _dice(rows: Iterable[Input], _: str) -> dict[str, Expected]:
    """The faces are random, but every row is counted once."""
    listed = list(rows)
    return {"result": Expected(Counter(), total=(len(listed), sum(r.value for r in listed)))}


def _millis(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=at.tzinfo)) // timedelta(milliseconds=1)


def _length() -> int:
    return WINDOW // timedelta(milliseconds=1)


def _begin(at: datetime) -> int:
    return _millis(at) // _length() * _length()


JOBS = {
    job.name: job
    for job in (
        BuiltInJob("echo", (*SINKS, *SERVER_SINKS), _echo, in_order="number"),
        BuiltInJob("sum", ("sqlite", "log", *SERVER_SINKS), _sum, "update", ("key",)),
        BuiltInJob("windows", (*SINKS, *SERVER_SINKS), _windows),
        BuiltInJob("distinct", (*SINKS, *SERVER_SINKS), _distinct),
        BuiltInJob("join", (*SINKS, *SERVER_SINKS), _join, sources=("first", "again")),
        BuiltInJob("several", ("all", "servers"), _several),
        BuiltInJob("dice", ("sqlite", "postgres"), _dice, "update", ("face",), repeats=False),
        BuiltInJob("topic", ("kafka",), _echo, in_order="number", topic=True),
        BuiltInJob("keyed", ("sqlite", "log", *SERVER_SINKS), _sum, "update", ("key",), keyed=True),
        BuiltInJob("timers", (*SINKS, *SERVER_SINKS), _windows, keyed=True),
        BuiltInJob("expiring", (*SINKS, *SERVER_SINKS), _distinct, keyed=True),
        BuiltInJob(
            "steps", ("sqlite", "postgres"), _dice, "update", ("face",), repeats=False, keyed=True
        ),
    )
}


def cases(
    faults: int, jobs: Sequence[str] = (), sinks: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Which jobs run with which sinks: every job, with as many sinks as there are faults for.

    Each job begins with another sink. Servers are used only if `sinks` names them.
    """
    allowed = {*sinks} or {*SINKS}
    allowed |= {"all"} if allowed >= {*SINKS} else set()
    allowed |= {"servers"} if allowed >= {*SERVER_SINKS} else set()
    wanted = [JOBS[name] for name in jobs] or list(JOBS.values())
    wanted = [job for job in wanted if allowed & {*job.sinks}]
    rounds: list[list[tuple[str, str]]] = [[] for _ in (*SINKS, *SERVER_SINKS)]
    for number, job in enumerate(wanted):
        have = [s for s in job.sinks if s in allowed]
        for turn in range(len(have)):
            rounds[turn].append((job.name, have[(number + turn) % len(have)]))
    found = [case for turn in rounds for case in turn]
    return found if sinks else found[: max(len(wanted), faults // _FAULTS_A_CASE)]
