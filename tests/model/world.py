"""The state that the drivers of one query share, and the memory of each driver."""

from __future__ import annotations

from typing import Any, NamedTuple


class Fence(NamedTuple):
    """An entry of the epoch log: from here on the driver of this term leads."""

    term: int

    def __str__(self) -> str:
        return f"fence({self.term})"


class Attempt(NamedTuple):
    """One evaluation of one epoch. Its rows and its state are those of no other attempt.

    As an entry of the epoch log it is the decision; (term, epoch) is its nonce."""

    epoch: int
    start: int  # the input is the rows 0, 1, 2 …
    end: int
    term: int  # of the driver that evaluated it
    base: int  # the term of the attempt whose state it continues; 0: there was none
    file: int | None = None  # the content of Spark's offsets/<epoch> when it was checked

    def __str__(self) -> str:
        return f"epoch {self.epoch} = rows [{self.start},{self.end}) by driver {self.term}"


class RollUp(NamedTuple):
    """The result of the entries up to `number`. Their names may be freed from then on."""

    number: int = 0
    term: int = 0
    decisions: tuple[Attempt, ...] = ()


class Target(NamedTuple):
    """The target of an output: the term in its ledger, and the attempts that a reader sees."""

    term: int = 0
    shown: tuple[Attempt, ...] = ()  # the ledger's position and decision are the last of them

    @property
    def epoch(self) -> int:
        return self.shown[-1].epoch if self.shown else -1


class World(NamedTuple):
    lease: int = 0  # the highest term that was taken
    log: tuple[Fence | Attempt | None, ...] = ()  # log/1, log/2 …; None: the name was freed
    roll_up: RollUp = RollUp()
    staged: frozenset[tuple[int, Attempt]] = frozenset()  # (output, attempt)
    moved: frozenset[tuple[int, Attempt]] = frozenset()  # in place in a folder, not committed yet
    targets: tuple[Target, ...] = ()
    offsets: tuple[int | None, ...] = ()  # Spark's offsets/<N>: where epoch N ends
    commits: tuple[int | None, ...] = ()  # Spark's commits/<N>: the state, by the attempt's term
    state_removed: frozenset[Attempt] = frozenset()
    # History that no step reads; the rules check it.
    decided: tuple[Attempt, ...] = ()
    fenced: int = 0  # the highest term whose fence stands

    def but(self, **changes: Any) -> World:
        return self._replace(**changes)

    def entry(self, number: int) -> Fence | Attempt | None:
        return self.log[number - 1] if number <= len(self.log) else None

    def with_entry(self, number: int, entry: Fence | Attempt | None) -> World:
        return self.but(log=(*self.log[: number - 1], entry, *self.log[number:]))

    def with_target(self, output: int, target: Target) -> World:
        return self.but(targets=(*self.targets[:output], target, *self.targets[output + 1 :]))

    def with_file(self, folder: str, epoch: int, value: int | None) -> World:
        """`offsets/<epoch>` or `commits/<epoch>`; None: it is removed."""
        files = getattr(self, folder)
        return self.but(**{folder: (*files[:epoch], value, *files[epoch + 1 :])})

    def showing(self, output: int, rows: Attempt) -> World:
        target = self.targets[output]
        world = self.with_target(output, target._replace(shown=(*target.shown, rows)))
        return world.but(moved=world.moved - {(output, rows)})

    def without_staged(self, attempt: Attempt) -> World:
        return self.but(staged=frozenset(s for s in self.staged if s[1] != attempt))


class Driver(NamedTuple):
    """One start of a query. Its term is its name."""

    next: str = "open.led"  # the step that it takes next
    term: int = 0
    attempt: Attempt | None = None  # the epoch that it runs; None while it opens
    output: int = 0  # the next output to fence or to publish
    # the part of the epoch log that it has read
    position: int = 0
    seen: int = 0  # the highest term
    decisions: tuple[tuple[int, Attempt], ...] = ()  # with their numbers
    stood: int = 0  # the number of our newest entry; an entry of another driver above fences us
    # in the middle of a step
    reading: int = 0  # the number at which catching up began
    then: str = ""  # the step that follows when it has caught up
    answered: bool = True  # did the put report that it won?
    agreed: int = 0  # the number of Spark's files that agree
    sweeping: str = ""  # the next step of the sweep that runs beside Spark

    def but(self, **changes: Any) -> Driver:
        return self._replace(**changes)

    def to(self, step: str, **changes: Any) -> Driver:
        return self._replace(next=step, **changes)

    def having_read(self, number: int, entry: Fence | Attempt) -> Driver:
        seen, decisions = max(self.seen, entry.term), self.decisions
        if isinstance(entry, Attempt):
            decisions = (*decisions, (number, entry))
        return self.but(position=number, seen=seen, decisions=decisions)

    @property
    def entry(self) -> Fence | Attempt:
        """The entry that it appends to the epoch log."""
        return self.attempt or Fence(self.term)

    @property
    def last(self) -> Attempt | None:
        return self.decisions[-1][1] if self.decisions else None

    @property
    def running(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt


STOPPED = Driver("stopped")
DONE = Driver("done")
