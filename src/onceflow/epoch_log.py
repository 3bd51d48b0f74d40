"""The epoch log: the numbered log of fences and decisions of one query in one lineage.

It is the truth about a query; Spark's checkpoint follows it. Entries are `fence` (a driver leads
from here on), `epoch` (a decision: this epoch will be published, with all that it takes) and
`end` (the lineage is closed; nothing follows).

An append goes to head + 1 and nowhere else, after a walk over everything between where this
driver last stood and the head:

- a term above ours anywhere, or an end: `Fenced`;
- a lost put: read the winner. Our nonce: it was us and the answer got lost. Anybody else's: a
  fence walks on and tries the next number, a decision is `Fenced`;
- a put that a roll-up covers has written nothing.
"""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass, field
from typing import Any

from onceflow.errors import Fenced
from onceflow.ledger import Committable, Guarantee, Position
from onceflow.storage import NumberedLog, Put, Store


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

    @property
    def rows(self) -> int:
        return sum(file.rows for output in self.outputs.values() for file in output.files)

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
    """The log as far as it was read."""

    def __init__(self) -> None:
        self.restart(0, None)

    def restart(self, position: int, roll_up: dict[str, Any] | None) -> None:
        body = roll_up or {}
        self.position = position
        self.term: int = body.get("term", 0)
        self.fence: dict[str, Any] | None = body.get("fence")
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
            case "end":
                self.end = entry


class EpochLog:
    """Reads for everybody; appends for the driver that holds `term`."""

    def __init__(self, store: Store, subject: str) -> None:
        self._log = NumberedLog(store, "log", "epoch log", subject)
        self._view = _View()
        self._term = 0
        self._stood = 0  # the number of our newest entry; nobody may follow it but us

    # -------------------------------------------------------------- reading

    def read(self) -> EpochLog:
        self._log.catch_up(self._view)
        return self

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

    # -------------------------------------------------------------- appending

    def fence(self, term: int, facts: dict[str, Any]) -> None:
        """From here on no term below `term` can decide."""
        self._term = term
        entry = {**facts, "type": "fence", "term": term, "nonce": uuid.uuid4().hex}
        while True:
            self._log.catch_up(self._view)
            if self._view.end is not None or self._view.term >= term:
                raise self._fenced()
            if self._append(entry):
                return

    def check(self) -> None:
        """Raise `Fenced` if anybody has come after us."""
        self._log.catch_up(self._view)
        if self._view.position != self._stood or self._view.term != self._term:
            raise self._fenced()

    def successor(self) -> Fenced | None:
        """Has somebody taken our place? For telling why something failed."""
        self._log.catch_up(self._view)
        taken = self._view.end is not None or self._view.term > self._term
        return self._fenced() if taken else None

    def decide(self, decision: Decision) -> None:
        """The commit point. `Fenced`: this epoch was not decided by us."""
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
            put = Put.WON if ours and not self._log.covered(number) else put
        if put is Put.WON:
            self._view.apply(number, entry)
            self._stood = number
        return put is Put.WON

    def _fenced(self) -> Fenced:
        if self._view.end is not None:
            return Fenced(
                "this lineage has ended: the job was restored or rolled back",
                hint="start the job again; it goes on in the new lineage",
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

    def roll_up(self, *, keep: int, slack: int) -> bool:
        """Free old entries, but keep those of the last `keep` decisions. True if it did."""
        decisions = self._view.decisions
        if len(decisions) <= keep + slack:
            return False
        # The two newest decisions that are covered: recovery needs offsets/<N-1> and <N>.
        covered = [pair for pair in decisions if pair[0] <= decisions[-keep - 1][0]]
        number = covered[-1][0]
        body = {
            "term": self._view.term,
            "fence": self._view.fence,
            "end": self._view.end,
            "decisions": [decision.to_json() for _, decision in covered[-2:]],
        }
        self._log.roll_up(number, body)
        self._view.decisions = decisions[max(0, len(covered) - 2) :]
        return True

    def prune(self) -> None:
        """Finish what a killed roll-up left half done."""
        self._log.prune()

    @property
    def entries(self) -> int:
        return self._log.size()
