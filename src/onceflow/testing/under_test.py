"""A sink under test: the hooks of its author, and drivers, rows and checks for it."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from onceflow.contract.ledger import Ledger, Publication
from onceflow.contract.schema import parse_schema
from onceflow.contract.sink import Sink
from onceflow.testing.moments import at_moments
from onceflow.testing.rows import Row, difference, make_row
from onceflow.testing.stand_in import OUTPUT, StandIn, folder_values


class SinkUnderTest:
    """Define `make_sink` and `read_rows`; all other hooks have defaults.

    Each test has a folder of its own. If the target is elsewhere, use the name of the folder for a
    table, a topic or a schema that nobody else uses.
    """

    columns: ClassVar[str] = (
        "id long, name string, amount decimal(20,4), ratio double, ok boolean, day date, "
        "at timestamp, data binary, tags array<string>, place struct<x: long, y: string>"
    )  # the first is `id long`; leave out types that the sink does not accept
    modes: ClassVar[tuple[str, ...]] = ()  # those to test, if not all of `Sink.modes`
    secret: ClassVar[str] = ""  # a password that `make_sink` gives to the sink
    tries: ClassVar[int] = 8  # at so many moments a publish is killed, or its driver replaced
    upserts: ClassVar[bool] = False  # even in append mode: does it keep one row of each `id`?

    def make_sink(self, folder: Path) -> Sink:
        """A new sink. All sinks of one folder have the same target, which this does not create."""
        raise NotImplementedError

    def read_rows(self, folder: Path) -> list[Row]:
        """The committed rows, read with the target's own client and not with the sink; none if
        there is no target yet. Values are those of Arrow's `to_pylist`: times in UTC."""
        raise NotImplementedError

    def read_epochs(self, folder: Path) -> list[Row]:
        """The same, by a reader that sees whole epochs only, if plain readers may see parts."""
        return self.read_rows(folder)

    def read_latest(self, folder: Path) -> list[Row]:
        """In update mode: the last row of each `id`, if the target keeps older ones."""
        return self.read_rows(folder)

    def has_target(self, folder: Path) -> bool:
        """Does the target exist, or anything that belongs to it?"""
        return any(folder.iterdir())

    def folders(self, sink: Sink, row: Row) -> tuple[str, ...]:
        """A value for each level of sub-folders, if they are not columns."""
        return folder_values(sink, row)

    def commit_fails(self, sink: Sink, *, landed: bool) -> AbstractContextManager[object] | None:
        """In the block, the first commit of this sink fails with an error. `landed`: it takes
        effect nevertheless. None: errors of commits are not tested."""
        return None

    # -------------------------------------------------------------- tools for tests

    def begin(self, root: Path, session: Any = None) -> None:
        self.root, self._session = root, session
        self.folder = root / f"t{uuid.uuid4().hex[:12]}"
        self.folder.mkdir()
        self.schema = parse_schema(self.columns)
        self.seed = int(os.environ.get("ONCEFLOW_SEED") or random.randrange(2**32))
        print(f"ONCEFLOW_SEED={self.seed} repeats the sizes of these epochs")  # noqa: T201
        sizes = random.Random(self.seed)
        self.few, self.many = sizes.randint(6, 12), sizes.randint(1_001, 1_500)
        self.large: set[int] = set()  # epochs with many rows

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_session": None}  # a session cannot be sent to another process

    def driver(self, term: int, **changes: Any) -> StandIn:
        """A driver with a sink of its own."""
        sink = self.make_sink(self.folder)
        facts = {"schema": self.schema, "mode": self.modes_of(sink)[0], **changes}
        return StandIn(sink=sink, home=self.root / "home", term=term, folders=self.folders,
                       session=self._session, **facts)  # fmt: skip

    def modes_of(self, sink: Sink) -> tuple[str, ...]:
        return self.modes or sink.modes

    def rows(self, *epochs: int, version: int = 0) -> list[Row]:
        """A few rows for each epoch, many for those in `large`; no two with the same `id`."""
        sizes = [(epoch, self.many if epoch in self.large else self.few) for epoch in epochs]
        ids = [epoch * 10_000 + n for epoch, size in sizes for n in range(size)]
        return [make_row(self.schema, n, version=version) for n in ids]

    def run(self, driver: StandIn, *epochs: int) -> Publication:
        """Run these epochs; returns the decision of the last."""
        return [driver.run(epoch, self.rows(epoch)) for epoch in epochs][-1]

    def ledger(self, output: str = OUTPUT) -> Ledger:
        """The ledger, as a new driver reads it."""
        driver = self.driver(0, output=output)
        driver.sink.prepare(output, self.schema, driver.mode)
        return driver.sink.published(output)

    def moments(self, work: Callable[[], object], tries: int | None = None) -> list[int]:
        """Do the work and count its moments; return `tries` of them, from first to last."""
        passed: list[int] = []
        with at_moments(passed.append):
            work()
        assert passed, "the work made no call that leaves Python"
        steps = max(1, (tries or self.tries) - 1)
        return sorted({1 + (len(passed) - 1) * n // steps for n in range(steps + 1)})

    def check(self, last: Publication, *epochs: int, term: int = 1, when: str = "") -> None:
        """The target has the rows of these epochs, and its ledger says that `last` was the last."""
        same(self.read_rows(self.folder), self.rows(*epochs), when)
        found, wanted = self.ledger(last.output), Ledger(term, last.position, last.decision)
        assert found == wanted, f"{when}: the ledger is {found}, not {wanted}"


def same(found: list[Row], wanted: list[Row], when: str = "") -> None:
    wrong = difference(found, wanted)
    assert not wrong, f"{when}: {wrong}" if when else wrong
