"""A board of an application and runs of `onceflow verify` under a home, for the page to show."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from ads.board import Board
from ads.budget import Campaign

from onceflow.harness.result import CaseResult, Result
from onceflow.harness.run_record import RunRecord

CLICKS = (3, 5, 8)  # a second, by campaign
NAMES = ("breakfast", "lunch", "dinner")
PRICE = 250_000  # micro-units
BUDGET = 200_000_000


class Ads:
    """The board of an application with a clock of the test."""

    def __init__(self, home: Path) -> None:
        self.now = 1_760_000_000.0
        self.clicks = 0
        self.board = Board(home, clock=lambda: self.now)

    def second(self, *, committed: bool = True) -> None:
        """A second in which people clicked; `committed`: a job counted them."""
        self.now += 1
        truth = int(self.now - 1_760_000_000)
        self.clicks = truth if committed else self.clicks
        self.board.sample(
            [
                Campaign(name, n, n * PRICE, BUDGET, "2025-10-09T08:53:20Z" if full else None)
                for name, each in zip(NAMES, CLICKS, strict=True)
                for n in [self.clicks * each]
                for full in [n * PRICE > BUDGET]
            ],
            truth_clicks={n: truth * each for n, each in zip(NAMES, CLICKS, strict=True)},
            truth_spend_micros={
                n: truth * each * PRICE for n, each in zip(NAMES, CLICKS, strict=True)
            },
            now=True,
        )


def fill(home: Path) -> str:
    """Write a board with a kill, a run of verify that has ended and one that is in progress. Return
    the name of the former."""
    ads = Ads(home)
    for second in range(120):
        if second == 40:
            ads.board.mark("kill", "kill -9 of aggregation: 14 processes")
        if second == 52:
            ads.board.mark("start", "aggregation starts again")
        ads.second(committed=not 40 <= second < 55)
    ads.board.mark("verdict", "lost 0, duplicated 0", exact=True)

    root = home / "_verify"
    begin = {"event": "begin", "seed": 7}
    ended = RunRecord(root, "onceflow verify --seed 7")
    ended.take(begin)
    ended.ended(_result().as_json())
    (run,) = (path.name for path in root.iterdir())
    going_on = RunRecord(root, "onceflow verify --seed 8")
    going_on.take({**begin, "seed": 8})
    going_on.take(
        {"event": "fault", "kind": "kill-point", "at_s": 2.5, "what": "driver 7 at epoch.decided"}
    )
    going_on.take(
        {"event": "progress", "job": "echo", "sinks": "files", "faults": 12, "of": 40,
         "rows_in": 12_000, "rows_out": 11_500, "violations": 0}
    )  # fmt: skip
    return run


def _result() -> Result:
    samples = [(float(s), 40 * s) for s in range(30)]
    case = CaseResult("echo", "files", {"result/result": "exactly-once"}, samples=samples)
    case.seconds = 30.0
    result = Result(7, "onceflow verify --seed 7", "local", "2026-01-01T00:00:00Z", cases=[case])
    result.faults = [
        {"number": n, "case": 0, "kind": kind, "point": "epoch.decided", "job": "echo",
         "sinks": "files", "at_s": 3.0 + 5 * n, "hit": True, "what": f"driver 7{n} at a point",
         "recovery_s": 1.5, "start_up_s": 0.0}
        for n, kind in enumerate(("kill-point", "freeze", "kill-point"))
    ]  # fmt: skip
    result.seconds = 30.0
    return result
