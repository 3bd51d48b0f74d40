"""The epoch log: the numbered log of fences and decisions of one query in one lineage.

Where Spark's checkpoint differs from it, onceflow changes the checkpoint. Entries are:

- `fence`   a driver leads from here on
- `epoch`   a decision: this epoch will be published, with everything that recovery needs
- `begin`   the first entry of a lineage that continues from a cut of another, with the decisions
            of that cut
- `end`     the lineage is closed, and which lineage continues it; nothing follows

An append writes only entry head + 1, after this driver has read every entry between its own newest
entry and the head:

- it finds a term above ours, or an end: `Fenced`;
- it loses the put: it reads the winning entry. With our nonce, we had won and the reply got lost.
  With another nonce, a fence reads on and tries the next number, and a decision is `Fenced`;
- a roll-up covers the number: the put has written nothing.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from onceflow.contract.ledger import Committable, Guarantee, Position
from onceflow.errors import Fenced
from onceflow.store.posix import NumberedLog, Put, Store, View


@dataclass(frozen=True)
class OutputDecision:
    """What one output publishes in this epoch, and from which ledger position."""

    previous: Position | None
    files: tuple[Committable, ...]
    schema: str
    mode: str
    guarantee: Guarantee = Guarantee.EXACTLY_ONCE


@dataclass(frozen=True)
class Decision:
    """The commit point of an epoch, with all that publishing and recovery need."""

    epoch: int
    term: int
    at: str
    start: dict[str, Any]  # source -> offset, as Spark planned it
    end: dict[str, Any]
    offsets: str  # Spark's offsets/<N>, verbatim
    sources: dict[str, dict[str, list[str]]]  # file source -> log offset -> its entries
    state: dict[str, list[list[str]]]  # operator -> partition -> ids of the state written
    watermark: int  # of the next epoch, milliseconds
    outputs: dict[str, OutputDecision]
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)
    digest: int | None = None  # of all rows; None: not taken, or too many rows
    now: int = 0  # the time that keyed steps were given, microseconds; it never goes back
    keyed: dict[str, dict[str, Any]] = field(default_factory=dict)  # step -> its state and time

    @property
    def rows(self) -> int:
        return sum(file.rows for output in self.outputs.values() for file in output.files)

    @property
    def lowest_watermark(self) -> int | None:
        """The lowest watermark of the query and its keyed steps in the next epoch, in
        milliseconds; None if there is none."""
        of_steps = (step["watermark"] for step in self.keyed.values())
        found = [at // 1000 for at in of_steps if at is not None]
        return min([*found, *([self.watermark] if self.watermark else [])], default=None)

    def to_json(self) -> dict[str, Any]:
        return {"type": "epoch", **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> Decision:
        fields = {k: v for k, v in entry.items() if k != "type"}
        fields["outputs"] = {
            name: OutputDecision(
                previous=Position(**o["previous"]) if o["previous"] else None,
                files=tuple(Committable(**f) for f in o["files"]),
                schema=o["schema"],
                mode=o["mode"],
                guarantee=Guarantee(o["guarantee"]),
            )
            for name, o in entry["outputs"].items()
        }
        return cls(**fields)


class _View:
    """The part of the log that was read."""

    def __init__(self) -> None:
        self.restart(0, None)

    def restart(self, position: int, roll_up: dict[str, Any] | None) -> None:
        body = roll_up or {}
        self.position = position
        self.term: int = body.get("term", 0)
        self.fence: dict[str, Any] | None = body.get("fence")
        self.begin: dict[str, Any] | None = body.get("begin")
        self.end: dict[str, Any] | None = body.get("end")
        self.decisions: list[tuple[int, Decision]] = [
            (position, Decision.from_json(d)) for d in body.get("decisions", ())
        ]

    def apply(self, number: int, entry: dict[str, Any]) -> None:
        self.position = number
        self.term = max(self.term, entry["term"])
        match entry["type"]:
            case "fence":
                self.fence = entry
            case "epoch":
                self.decisions.append((number, Decision.from_json(entry)))
            case "begin":
                self.begin = {k: v for k, v in entry.items() if k != "decisions"}
                self.decisions = [(number, Decision.from_json(d)) for d in entry["decisions"]]
            case "end":
                self.end = entry


class EpochLog:
    """The epoch log of one query. Any process may read it; only the driver that leads appends."""

    def __init__(self, store: Store, subject: str) -> None:
        self._log = NumberedLog(store, "log", "epoch log", subject)
        self._view = _View()
        self._term = 0
        self._ours = 0  # the number of our newest entry; an entry of another driver above fences us

    # -------------------------------------------------------------- reading

    def read(self) -> EpochLog:
        self._log.catch_up(self._view)
        return self

    def forget(self) -> None:
        """Drop all decisions but the last, for a reader that needs no other."""
        del self._view.decisions[:-1]

    def follow(self, view: View) -> None:
        """Bring a view of the caller's own to the head of the log."""
        self._log.catch_up(view)

    @property
    def term(self) -> int:
        """The highest term in the log."""
        return self._view.term

    @property
    def empty(self) -> bool:
        return self._view.position == 0

    @property
    def decisions(self) -> list[Decision]:
        """The retained decisions, oldest first."""
        return [decision for _, decision in self._view.decisions]

    @property
    def last(self) -> Decision | None:
        return self._view.decisions[-1][1] if self._view.decisions else None

    @property
    def leader(self) -> dict[str, Any] | None:
        """The newest fence: who leads, with which outputs and versions."""
        return self._view.fence

    @property
    def opened(self) -> bool:
        """Has a driver that runs epochs ever led here? Otherwise no target knows this lineage."""
        return self._view.fence is not None and "outputs" in self._view.fence

    @property
    def begun(self) -> dict[str, Any] | None:
        """The `begin` entry, if this lineage continues from a cut of another."""
        return self._view.begin

    @property
    def ended(self) -> dict[str, Any] | None:
        """The `end` entry of this lineage: which one continues it, and from which cut."""
        return self._view.end

    # -------------------------------------------------------------- reading a few entries only

    def read_end(self) -> dict[str, Any] | None:
        """The `end` entry, as `ended`, without reading the entries before it."""
        rolled, numbers = self._log.numbers()
        entry = self._log.entry(numbers[-1]) if numbers else self._log.read_roll_up(rolled)
        if entry is None and (rolled or numbers):
            return self.read().ended  # another process rolls it up at this moment
        if numbers:
            return entry if entry is not None and entry["type"] == "end" else None
        return (entry or {}).get("end")

    def decisions_around(self, first: int) -> tuple[Decision, Decision] | None:
        """The oldest decision from epoch `first` on and the newest of all, found by bisection."""
        rolled, numbers = self._log.numbers()
        low, high = 0, len(numbers)
        while low < high:  # to the first entry where it, or the next decision, is not below `first`
            middle = (low + high) // 2
            found = self._decided(numbers[middle:])
            if found is None or found[-1].epoch >= first:
                high = middle
            else:
                low = middle + 1
        body = self._log.read_roll_up(rolled) or {}
        old = [Decision.from_json(d) for d in body.get("decisions", ())]
        before = [decision for decision in old if decision.epoch >= first]
        begin = before or self._decided(numbers[low:]) or []
        end = self._decided(numbers[::-1]) or old
        return (next(d for d in begin if d.epoch >= first), end[-1]) if begin and end else None

    def _decided(self, numbers: list[int]) -> list[Decision] | None:
        """The decisions in the first of these entries that has any."""
        for number in numbers:
            entry = self._log.entry(number) or {}
            if entry.get("type") == "epoch":
                return [Decision.from_json(entry)]
            if entry.get("type") == "begin":
                return [Decision.from_json(decision) for decision in entry["decisions"]]
        return None

    # -------------------------------------------------------------- appending

    def begin(self, facts: dict[str, Any], decisions: list[Decision]) -> None:
        """Write the first entry of a new lineage, which continues from these decisions."""
        entry = {
            **facts, "type": "begin", "term": 0, "nonce": uuid.uuid4().hex,
            "decisions": [decision.to_json() for decision in decisions],
        }  # fmt: skip
        if self._log.put(1, entry) is not Put.WON:
            raise Fenced(
                "another process creates this lineage at the same time",
                hint="run the command again",
            )

    def end(self, facts: dict[str, Any]) -> None:
        """Close the lineage. `Fenced` if another driver was first."""
        self.check()
        entry = {**facts, "type": "end", "term": self._term, "nonce": uuid.uuid4().hex}
        if not self._append(entry):
            self._log.catch_up(self._view)
            raise self._fenced()

    def fence(self, term: int, facts: dict[str, Any]) -> None:
        """Append the fence of `term`: from here on no term below it can decide."""
        self._term = term
        entry = {**facts, "type": "fence", "term": term, "nonce": uuid.uuid4().hex}
        while True:
            self._log.catch_up(self._view)
            if self._view.end is not None or self._view.term >= term:
                raise self._fenced()
            if self._append(entry):
                return

    def check(self) -> None:
        """Raise `Fenced` if another driver has followed us."""
        self._log.catch_up(self._view)
        if self._view.position != self._ours or self._view.term != self._term:
            raise self._fenced()

    def successor(self) -> Fenced | None:
        """The reason to report if another driver has replaced us; None if none has."""
        self._log.catch_up(self._view)
        taken = self._view.end is not None or self._view.term > self._term
        return self._fenced() if taken else None

    def decide(self, decision: Decision) -> None:
        """Append the decision: the commit point. `Fenced` if another driver was first."""
        self.check()
        if not self._append(decision.to_json()):
            self._log.catch_up(self._view)
            raise self._fenced()

    def _append(self, entry: dict[str, Any]) -> bool:
        number = self._view.position + 1
        put = self._log.put(number, entry)
        if put is Put.LOST:
            winner = self._log.entry(number)
            ours = winner is not None and winner["nonce"] == entry["nonce"]
            put = Put.WON if ours and not self._log.is_covered(number) else put
        if put is Put.WON:
            self._view.apply(number, entry)
            self._ours = number
        return put is Put.WON

    def _fenced(self) -> Fenced:
        if self._view.end is not None:
            return Fenced(
                "this lineage has ended: the job was restored or rolled back",
                hint="start the job again; it continues in the new lineage",
            )
        by = self._view.fence or {}
        holder = by.get("holder", {})
        return Fenced(
            f"term {self._view.term} leads this query now (process {holder.get('pid', '?')} on "
            f"{holder.get('host', '?')}, since {by.get('at', '?')}); this driver had term "
            f"{self._term}",
            hint="let the other driver work, or start again with --take-over",
        )

    # -------------------------------------------------------------- roll-up

    def roll_up(
        self, *, keep: int, slack: int, before: Callable[[list[Decision]], object] = lambda _: None
    ) -> bool:
        """Free old entries, but keep those of the last `keep` decisions. Return whether it did.

        `before` is called with the decisions before the log frees them.
        """
        decisions = self._view.decisions
        if len(decisions) <= keep + slack:
            return False
        # Keep the two newest decisions that are covered: recovery needs offsets/<N-1> and <N>.
        covered = [pair for pair in decisions if pair[0] <= decisions[-keep - 1][0]]
        number = covered[-1][0]
        body = {
            "term": self._view.term,
            "fence": self._view.fence,
            "begin": self._view.begin,
            "end": self._view.end,
            "decisions": [decision.to_json() for _, decision in covered[-2:]],
        }
        freed = max(0, len(covered) - 2)
        before([decision for _, decision in decisions[:freed]])
        self._log.roll_up(number, body)
        self._view.decisions = decisions[freed:]
        return True

    def prune(self) -> None:
        """Finish a roll-up that was killed."""
        self._log.prune()

    @property
    def entries(self) -> int:
        return self._log.size()
