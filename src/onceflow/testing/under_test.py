"""A sink under test: what its author says of it, and drivers, rows and checks for it."""

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
    """`make_sink` and `read_rows` must be given; the rest has defaults.

    Each test has a folder of its own. A sink whose target is elsewhere takes the folder's name for
    that of a table, a topic or a schema that nobody else uses.
    """

    columns: ClassVar[str] = (
        "id long, name string, amount decimal(20,4), ratio double, ok boolean, day date, "
        "at timestamp, data binary, tags array<string>, place struct<x: long, y: string>"
    )  # the first is `id long`; leave out the types that the sink does not take
    modes: ClassVar[tuple[str, ...]] = ()  # what it takes, if that is not all of `Sink.modes`
    secret: ClassVar[str] = ""  # a password that `make_sink` gives to the sink
    tries: ClassVar[int] = 8  # a publish is killed, or its driver replaced, at so many moments
    upserts: ClassVar[bool] = (
        False  # does the target keep one row of each `id`, in append mode too?
    )

    def make_sink(self, folder: Path) -> Sink:
        """A new sink. All that are made for one folder have one target, which is not created."""
        raise NotImplementedError

    def read_rows(self, folder: Path) -> list[Row]:
        """The committed rows, read by the target's own means and not by the sink; none if there is
        no target yet. Values are as Arrow's `to_pylist` gives them: times in UTC."""
        raise NotImplementedError

    def read_epochs(self, folder: Path) -> list[Row]:
        """The same by a reader that sees whole epochs, if plain readers may see a part of one."""
        return self.read_rows(folder)

    def read_latest(self, folder: Path) -> list[Row]:
        """In update mode: the last row of each `id`, if the target keeps older ones."""
        return self.read_rows(folder)

    def has_target(self, folder: Path) -> bool:
        """Was the target, or anything for it, created?"""
        return any(folder.iterdir())

    def folders(self, sink: Sink, row: Row) -> tuple[str, ...]:
        """A value for each level of sub-folders, if these are not columns."""
        return folder_values(sink, row)

    def commit_fails(self, sink: Sink, *, landed: bool) -> AbstractContextManager[object] | None:
        """In the block, the first commit of this sink ends with an error. `landed`: it has taken
        effect all the same. None: what the sink makes of such an error is not tested."""
        return None

    # -------------------------------------------------------------- what tests are made of

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
        return {**vars(self), "_session": None}  # a session does not go to another process

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
        """As a driver that has just come reads it."""
        driver = self.driver(0, output=output)
        driver.sink.prepare(output, self.schema, driver.mode)
        return driver.sink.published(output)

    def moments(self, work: Callable[[], object], tries: int | None = None) -> list[int]:
        """Do the work and see how many moments it has; `tries` of them, from first to last."""
        passed: list[int] = []
        with at_moments(passed.append):
            work()
        assert passed, "nothing was done that lasts"
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
