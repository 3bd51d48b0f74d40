"""Which fault strikes when: a pure function of the seed and the cases."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from onceflow import faults

# kind -> what it does, for people
KINDS = {
    "kill-driver": "kill -9 of the Python driver, at a random time",
    "kill-jvm": "kill -9 of its JVM, at a random time",
    "kill-worker": "kill -9 of its Python workers, at a random time",
    "kill-executor": "kill -9 of an executor (cluster)",
    "kill-point": "kill -9 of the driver at a named fault point",
    "lost-commit": "kill -9 of all; Spark's newest commits/<N>, or offsets/<N> too, is deleted",
    "raise-point": "an exception at a named fault point",
    "zombie": "the driver is frozen at a fault point and continues after a successor took over",
    "fail-task": "a task fails in the middle of its rows; a keyed one also at its fault points",
    "slow-task": "a task takes seconds longer, and is speculated (cluster)",
    "truncate": "a file of onceflow loses its end; it is put back after the error",
    "flip": "a bit of a file of onceflow is flipped; it is put back after the error",
    "full-disk": "home and targets have no space left for a while",
    "savepoint": "a savepoint of the running job, or one that stops the job",
    "rollback": "the driver ends, and the job goes back to a retained epoch",
    "restore": "the driver ends, and the job goes back to a savepoint of this case",
    "fork": "a second job from a cut of the first, run once",
    "kill-broker": "kill -9 of a Kafka broker, at a random time or while the driver publishes",
    "freeze-broker": "a broker is frozen for longer than a transaction may take",
    "kill-postgres": "kill -9 of PostgreSQL, at a random time or while the driver publishes",
    "lost-answer": "the server commits, and its answer is lost",
    "open-transaction": "a foreign transaction is open on the ledger, and the driver ends",
}
KILLS = (
    "kill-driver", "kill-jvm", "kill-worker", "kill-executor", "kill-point", "lost-commit",
    "kill-broker", "kill-postgres",
)  # fmt: skip
CLUSTER = ("kill-executor",)
# kind -> the servers of which a case must have one
SERVERS = {
    "kill-broker": ("kafka",),
    "freeze-broker": ("kafka",),
    "kill-postgres": ("postgres",),
    "lost-answer": ("kafka", "postgres"),
    "open-transaction": ("kafka",),
}
BREAK_SERVERS = ("kill-broker", "freeze-broker", "kill-postgres", "lost-answer")
# Commands, each in a process of its own: one that is killed runs again.
SNAPSHOTS = ("savepoint", "rollback", "restore", "fork")
NEED_BUILT_IN = ("fail-task", "slow-task")
# Listed with the kinds of sinks of a case that has keyed steps.
KEYED = "keyed"
# Where a paused driver would hold a lock that its successor waits for.
_NO_SLEEP = ("sqlite.begun", "sqlite.written")
_VISITS = {
    "put": 8, "epoch": 3, "folder": 3, "sqlite": 2, "kafka": 2, "postgres": 2, "keyed": 2,
}  # fmt: skip
_DAMAGED = ("decision", "commit", "lineage")
_KEYED_DAMAGED = (*_DAMAGED, "manifest", "run")
_LOST = ("commits", "offsets")  # offsets: together with commits
# Where the driver waits when a server is broken; "": anywhere.
_STANDS = {
    "kill-broker": ("", "kafka.begun", "kafka.written", "kafka.committed-one"),
    "freeze-broker": ("", "kafka.begun", "kafka.written"),
    "kill-postgres": ("", "postgres.copied", "postgres.begun", "postgres.written"),
}
# Where such a command is killed or, after a restore, the next start is broken; "": nowhere.
_SPOTS = {
    "savepoint": (
        "", "", "savepoint.held", "savepoint.linked", "savepoint.copied", "savepoint.listed",
    ),
    "restore": (
        "", "", "restore.fenced", "restore.published", "restore.placed", "restore.written",
        "restore.made", "restore.ended-one", "open.ledger-moved",
    ),
    "fork": ("", "", "job.begun", "job.made", "job.listed"),
}  # fmt: skip
_TAKE_BACK = {
    "files": ("drop.committed", "drop.removed-one"), "log": ("drop.committed", "drop.removed-one"),
    "sqlite": ("sqlite.rewound",),
}  # fmt: skip
# How the driver ends before the command: by kill -9 at a random time, by `onceflow stop`, or at a
# point.
_ENDS = ("", "stop", "epoch.staged", "epoch.decided", "epoch.output-published", "epoch.published")
_BACK = 4  # savepoints or epochs, at most
_TAKEN = "kafka.begun"  # the driver has read the ledger and begins to publish
# The point of its successor's opening at which a zombie continues; "": after decided epochs.
_WAKINGS = ("open.led", "open.fenced", "open.ledgers-read", "open.published", "open.swept", "", "")


@dataclass(frozen=True)
class Fault:
    """One fault of a schedule."""

    number: int
    case: int
    kind: str
    point: str = ""  # a named fault point, if it strikes at one
    visit: int = 1  # of the point; or which savepoint or epoch, counted from the newest
    after: float = 0.0  # seconds before it strikes, if at a random time
    # What is damaged or deleted; whose answer is lost; rewind or skip; raise or kill.
    file: str = ""
    wakes: str = ""  # the point of the successor's opening at which a zombie continues
    back: bool = False  # the server is back before the driver continues from the point
    ends: str = ""  # how the driver ends before a command

    @property
    def what(self) -> str:
        wakes = f", continues at {self.wakes}" if self.wakes else ""
        wakes += ", back before the driver continues" if self.back else ""
        if self.kind in SNAPSHOTS:
            choice = f": {self.file}" if self.file else ""
            return f"{self.kind}{choice}{f', broken at {self.point}' if self.point else ''}"
        if self.point:
            return f"{self.kind} at {self.point}{wakes}"
        return f"{self.kind}: {self.file}" if self.file else self.kind

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in ("", 0.0)} | {
            "number": self.number, "case": self.case,
        }  # fmt: skip


def points(sinks: Iterable[str], *, asleep: bool = False) -> list[str]:
    """The fault points that the driver of a job with such sinks can reach."""
    kinds = set(sinks)
    found = list(faults.JOB)
    found += faults.FOLDER if kinds & {"files", "log"} else ()
    found += faults.SQLITE if "sqlite" in kinds else ()
    found += faults.KAFKA if "kafka" in kinds else ()
    found += faults.POSTGRES if "postgres" in kinds else ()
    found += faults.KEYED if KEYED in kinds else ()
    return [p for p in found if not asleep or (p not in _NO_SLEEP and not opens(p))]


def opens(point: str) -> bool:
    """Is it a point that a driver reaches only when it opens a query?"""
    return point.startswith("open.") or point == "kafka.fenced-one"


def fits(kind: str, sinks: Iterable[str]) -> bool:
    """Can a case with such sinks have this fault?"""
    return kind not in SERVERS or bool({*SERVERS[kind]} & {*sinks})


def is_kill(kind: str) -> bool:
    """For kinds of other harnesses too."""
    return kind in KILLS or kind.startswith("kill-")


def plan(
    seed: int,
    cases: list[tuple[str, ...]],
    *,
    count: int,
    kinds: Iterable[str],
    at: Iterable[str] = (),
) -> list[Fault]:
    """`cases`: the kinds of sinks of each, and `KEYED`; some kind of fault fits each of them.

    Every other fault is a kill, as far as `kinds` allow. Kinds and points come in turn, shuffled,
    so that all of them come as early as they can. All else that is left to chance follows from the
    seed and the number of the fault alone: a new fault point changes only where faults strike.
    """
    wanted = list(dict.fromkeys(kinds))
    kills = [kind for kind in wanted if kind in KILLS]
    others = [kind for kind in wanted if kind not in KILLS]
    # Most ways to kill are at a point: there are many.
    cards = [
        kills + ["kill-point"] * ("kill-point" in kills) * 2 or others,
        others + ["raise-point"] * ("raise-point" in others) * 3 or kills,
    ]
    decks = [_deck(seed, f"kinds {turn}", mine) for turn, mine in enumerate(cards)]
    spots = _Spots(seed, {sink for sinks in cases for sink in sinks}, set(at))
    found = []
    for number in range(count):
        case = number * len(cases) // count
        sinks, turn = cases[case], number % 2
        if not any(fits(kind, sinks) for kind in cards[turn]):
            turn = 1 - turn
        if not any(fits(kind, sinks) for kind in cards[turn]):
            raise ValueError(f"none of {wanted} can strike a case with {sinks}")
        kind = next(kind for kind in decks[turn] if fits(kind, sinks))
        chance = random.Random(f"{seed}/{number}")
        after = round(chance.uniform(0.0, 1.5), 3)
        found.append(Fault(number, case, kind, after=after, **spots.of(kind, sinks, chance)))
    return found


class _Spots:
    """Where faults strike, and how."""

    def __init__(self, seed: int, sinks: set[str], at: set[str]) -> None:
        """`at`: the points that were asked for; none: any."""
        self._seed, self._at = seed, at
        self._sinks = {"files", "sqlite", *(sinks & {"kafka", "postgres", KEYED})}
        self._decks: dict[str, Iterator[str]] = {}

    def of(self, kind: str, sinks: tuple[str, ...], chance: random.Random) -> dict[str, Any]:
        """What a fault of this kind has beside its kind."""
        if kind in ("kill-point", "raise-point", "zombie"):
            return self._at_point(kind, sinks, chance)
        if kind in ("truncate", "flip"):
            return {"file": chance.choice(_KEYED_DAMAGED if KEYED in sinks else _DAMAGED)}
        if kind == "lost-commit":
            return {"file": chance.choice(_LOST)}
        if kind == "fail-task" and KEYED in sinks:
            point = self._one_of(("", *faults.TASK), chance)
            return {"point": point, "file": chance.choice(("raise", "kill")) if point else ""}
        if kind in _STANDS:
            point = self._one_of(_STANDS[kind], chance)
            return {"point": point, "back": point != "" and chance.random() < 0.5}
        if kind == "open-transaction":
            return {"point": _TAKEN}
        if kind == "lost-answer":
            return {"file": chance.choice([server for server in SERVERS[kind] if server in sinks])}
        if kind in SNAPSHOTS:
            return self._snapshot(kind, sinks, chance)
        return {}

    def _one_of(self, points: tuple[str, ...], chance: random.Random) -> str:
        return chance.choice([point for point in points if point in self._at] or points)

    def _at_point(self, kind: str, sinks: tuple[str, ...], chance: random.Random) -> dict[str, Any]:
        asleep = kind == "zombie"
        reached = points(sinks, asleep=asleep)
        chosen = [point for point in reached if point in self._at] or reached
        if kind not in self._decks:
            self._decks[kind] = _deck(self._seed, kind, points(self._sinks, asleep=asleep))
        point = next(point for point in self._decks[kind] if point in chosen)
        wakes = chance.choice(_WAKINGS) if asleep else ""  # before what depends on the point
        visit = chance.randint(1, _VISITS.get(point.partition(".")[0], 1))
        return {"point": point, "visit": visit, "wakes": wakes}

    def _snapshot(self, kind: str, sinks: tuple[str, ...], chance: random.Random) -> dict[str, Any]:
        """What becomes of published rows, how the driver ends, where the command is broken, and
        which savepoint or epoch it goes back to."""
        file = ends = ""
        goes_back = kind in ("rollback", "restore")
        spots = _SPOTS["restore" if goes_back else kind]
        if goes_back:
            can_rewind = {*sinks} - {KEYED} != {"kafka"}
            file = chance.choice(("rewind", "skip")) if can_rewind else "skip"
            ends = chance.choice(_ENDS)
            if file == "rewind":
                spots += tuple(spot for sink in sinks for spot in _TAKE_BACK.get(sink, ()))
        elif kind == "savepoint":
            ends = chance.choice(("", "", "stop"))
        visit = chance.randint(1, _BACK)
        return {"point": self._one_of(spots, chance), "visit": visit, "file": file, "ends": ends}


def _deck(seed: int, name: str, cards: list[str]) -> Iterator[str]:
    """The cards again and again, shuffled each time."""
    chance = random.Random(f"{seed}/{name}")
    while True:
        yield from chance.sample(cards, len(cards))
