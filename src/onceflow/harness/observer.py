"""The reader of committed rows: it reads the whole time, through every fault."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onceflow.harness.epoch_logs import Decision, Lineages
from onceflow.harness.repeated import Repeated
from onceflow.harness.target_reader import read
from onceflow.harness.targets import Away, Corrupt, Published, Row, Target

_PAUSE = 0.2  # seconds
_LONGEST_PAUSE = 2.0
_MOST = 20  # violations that are kept for one output


@dataclass
class Seen:
    """What the reader saw of one output."""

    last: Published = field(default_factory=Published)
    rows: set[Row] = field(default_factory=set)  # all rows ever seen, if the output is upserted
    # Taken back: at least these must come again.
    owed: Counter[Row] = field(default_factory=Counter)
    backwards: list[str] = field(default_factory=list)
    corrupt: list[str] = field(default_factory=list)


class Observer(Repeated):
    """Polls targets and the epoch log. Its answers are as new as its last poll.

    A row that was seen must stay. It may go away only if a restore was told to take back the rows
    of its output after a cut, and only in the step in which the ledger moves to the new lineage. If
    the job `repeats`, the row must come again.
    """

    def __init__(
        self, home: Path, job: str, targets: list[Target], *, repeats: bool = True,
        pause: float = _PAUSE,
    ) -> None:  # fmt: skip
        super().__init__(self._look_on, every=pause)
        self.job, self.targets, self.repeats = job, targets, repeats
        self._pause = pause
        self.lineages = Lineages(home / job)
        self.seen = {target.output: Seen() for target in targets}
        self.decided: dict[str, dict[int, Decision]] = {}  # query -> epoch -> its decision
        self.samples: list[tuple[float, int]] = []  # (time, rows that can be read)
        self.polls = 0
        self._asked: dict[str, str] = {}  # output -> rewind or skip
        # lineage that a restore opened -> output -> rewind or skip
        self._choices: dict[str, dict[str, str]] = {}
        self._known: dict[str, dict[str, Any]] = {target.output: {} for target in targets}
        self._looking = threading.Lock()

    def _look_on(self) -> None:
        """One look. A long one is followed by a long pause: `used` are its seconds of CPU."""
        began = time.thread_time()
        self.look()
        used = time.thread_time() - began
        self.every = min(max(self._pause, 4 * used), _LONGEST_PAUSE)

    def close(self) -> None:
        """Close the consumers that are kept from poll to poll."""
        for known in self._known.values():
            if "reader" in known:
                known.pop("reader").close()

    @contextlib.contextmanager
    def looking_away(self) -> Iterator[None]:
        """While a file is damaged on purpose."""
        with self._looking:
            yield

    def restoring(self, choices: dict[str, str]) -> None:
        """A restore begins. `choices`: output -> rewind or skip."""
        with self._looking:
            self._follow()
            self._asked = choices

    # -------------------------------------------------------------- what it knows

    def progress(self) -> dict[str, int]:
        """query -> the last epoch that is decided."""
        return {query: max(found, default=-1) for query, found in self.decided.items()}

    def last(self, query: str) -> Decision | None:
        found = self.decided.get(query, {})
        return found[max(found)] if found else None

    @property
    def violations(self) -> int:
        return sum(len(s.backwards) + len(s.corrupt) for s in self.seen.values())

    @property
    def published(self) -> int:
        return sum(len(seen.last.rows) for seen in self.seen.values())

    # -------------------------------------------------------------- one look

    def look(self) -> None:
        with self._looking:
            self.poll()

    def poll(self) -> None:
        self._follow()
        for target in self.targets:
            self._look(target, self.seen[target.output])
        self.samples.append((time.monotonic(), self.published))
        self.polls += 1

    def _follow(self) -> None:
        self.lineages.look()
        self.decided = self.lineages.decided()
        for lineage in self.lineages.chain[1:]:
            self._choices.setdefault(lineage, self._asked)

    def _look(self, target: Target, seen: Seen) -> None:
        try:
            now = read(target, self.job, self._known[target.output])
        except Corrupt as error:
            _note(seen.corrupt, str(error))
            return
        except (Away, sqlite3.OperationalError):
            return  # a server is down, or there is no space for a lock: nothing was seen
        if now.lineage not in ("", seen.last.lineage, *self.lineages.chain):
            self._follow()  # the lineage is newer than our last look
        cut = self._taken_back(target.output, seen.last.lineage, now.lineage)
        if cut is None:
            _note(seen.backwards, *_went_back(target, seen.last, now))
        else:
            _note(seen.backwards, *_went_too_far(seen.last, now, cut))
            if self.repeats:
                seen.owed |= _items(target, seen.last)
        if seen.owed and seen.owed <= _items(target, now):
            seen.owed.clear()
        if target.upserted:
            seen.rows |= set(now.rows)
        seen.last = now

    def _taken_back(self, output: str, before: str, now: str) -> int | None:
        """The epoch after which the rows of an output were to be taken back, if they were."""
        chain = self.lineages.chain
        if now not in chain or before not in chain:
            return None
        passed = chain[chain.index(before) + 1 : chain.index(now) + 1]
        cuts = [
            self.lineages.cut(lineage, output.partition("/")[0])
            for lineage in passed
            if self._choices[lineage].get(output) == "rewind"
        ]
        return min(cuts, default=None)


def _items(target: Target, published: Published) -> Counter[Row]:
    """What must come again after a rewind: rows, or keys with any row."""
    if target.mode == "complete":
        return Counter()
    return Counter([*published.last_of_key(target.key)] if target.upserted else published.rows)


def _went_too_far(before: Published, now: Published, cut: int) -> Iterator[str]:
    kept = Counter(
        row
        for row, epoch in zip(before.rows, before.epochs, strict=True)
        if epoch is not None and epoch <= cut
    )
    lost = kept - Counter(now.rows)
    if lost:
        yield f"rows {_some(lost)} were there before the cut at epoch {cut} and are gone"


def _went_back(target: Target, before: Published, now: Published) -> Iterator[str]:
    if target.mode == "complete":
        return  # each epoch replaces the table
    if target.is_table and target.upserted:
        gone = set(before.last_of_key(target.key)) - set(now.last_of_key(target.key))
        if gone:
            yield f"keys {_some(gone)} were there and are gone"
    elif target.is_table and now.rows[: len(before.rows)] != before.rows:
        lost = Counter(before.rows) - Counter(now.rows)
        if lost:
            yield f"rows {_some(lost)} were there and are gone"
    elif target.is_folder and now.files[: len(before.files)] != before.files:
        yield f"files {_some(set(before.files) - set(now.files))} were published and are gone"
    if (before.ledger or -1) > (now.ledger if now.ledger is not None else -1):
        yield f"the ledger went back from epoch {before.ledger} to {now.ledger}"


def _note(notes: list[str], *said: str) -> None:
    notes += [text for text in said if text not in notes][: max(0, _MOST - len(notes))]


def _some(rows: Any) -> str:
    return ", ".join(str(row) for row in sorted(rows, key=str)[:3])
