"""Merge runs, so that each key group has few of them, within a bounded share of each epoch.

The newest runs are merged as soon as there are four in a row that are not larger than all newer
ones together. The runs that remain at least double in size from one to the next, so a group has
O(log n) runs, and a row is written O(log n) times.

The choice needs nothing but the manifest. A merge is part of an epoch: until the epoch is decided,
no manifest names the run that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pyarrow as pa

from onceflow.state.keys import first_place
from onceflow.state.manifest import Manifest, MergeResult, Run
from onceflow.state.runs import RunWriter
from onceflow.state.store import Reader, merge_runs
from onceflow.state.vectors import Bools

FEWEST = 4  # runs that are worth a merge
MOST = 16  # runs of a group; more are merged at any cost
_LEAST_BUDGET = 50_000
_SHARES = (4, 8)  # of the rows that a task writes

Expired = Callable[[pa.Table], Bools]


@dataclass(frozen=True)
class Merge:
    """The newest runs of some groups that become one; `whole`: these are all of their runs."""

    groups: range
    inputs: tuple[Run, ...]
    whole: bool


def plan_merges(
    manifest: Manifest, new: Run | None, groups: range, budget_rows: int | None = None
) -> list[Merge]:
    """The merges of a task after it wrote `new`, which read at most `budget_rows` rows.

    By default that is four to eight times the rows of `new`, more if groups have waited longer.
    Runs that are small enough are merged in all groups at once, so that their files are no longer
    needed and there are few files. If that exceeds the budget, groups are merged one by one, those
    with the most runs first, so that each has its turn. A group with more than `MOST` runs is
    merged even if it alone exceeds the budget.
    """
    stacks = dict(zip(groups, manifest.stacks(groups), strict=True))
    if new is not None:
        for group in groups:
            if new.count(group):
                stacks[group].insert(0, new)
    wanted = []
    for group, stack in stacks.items():
        sizes = [run.count(group) for run in stack]
        if (number := _count_worth(sizes)) >= FEWEST:
            wanted.append((-number, sum(sizes[:number]), group))
    wanted.sort()
    most = -wanted[0][0] if wanted else 0
    if budget_rows is None:
        share = min(max(_SHARES), max(min(_SHARES), most - FEWEST))
        budget_rows = max(share * (new.rows if new else 0), _LEAST_BUDGET)
    if most <= MOST and (small := _find_small(stacks, manifest, new, budget_rows)):
        return _join(
            Merge(range(group, group + 1), tuple(inputs), len(inputs) == len(stack))
            for group, stack in stacks.items()
            if (inputs := [run for run in stack if run.name in small])
        )
    chosen: list[Merge] = []
    for negative, rows, group in wanted:
        if rows <= budget_rows or (not chosen and -negative > MOST):
            newest, whole = stacks[group][:-negative], -negative == len(stacks[group])
            chosen.append(Merge(range(group, group + 1), tuple(newest), whole))
            budget_rows -= rows
    return _join(chosen)


def _find_small(
    stacks: Mapping[int, list[Run]], manifest: Manifest, new: Run | None, budget_rows: int
) -> set[str]:
    """The newest runs to merge in all groups at once, if there are enough of them."""
    rows: dict[str, int] = {} if new is None else {new.name: 0}
    rows.update((entry.run.name, 0) for entry in manifest.entries)
    for group, stack in stacks.items():
        for run in stack:
            rows[run.name] += run.count(group)
    names = [name for name in rows if rows[name]]  # newest first
    totals = list(accumulate(rows[name] for name in names))
    names = names[: sum(total <= budget_rows for total in totals)]
    number = _count_worth([rows[name] for name in names])
    return set(names[:number]) if number >= FEWEST else set()


def _count_worth(sizes: Sequence[int]) -> int:
    """How many of the newest runs to merge: up to the last not larger than all before it."""
    totals = list(accumulate(sizes))
    return max((i + 1 for i in range(1, len(sizes)) if sizes[i] <= totals[i - 1]), default=0)


def _join(merges: Iterable[Merge]) -> list[Merge]:
    """The merges by group; neighbours with the same runs become one merge."""
    found: list[Merge] = []
    for merge in sorted(merges, key=lambda m: m.groups.start):
        last = found[-1] if found else None
        if last and last.groups.stop == merge.groups.start and _have_same_runs(last, merge):
            found[-1] = Merge(range(last.groups.start, merge.groups.stop), last.inputs, last.whole)
        else:
            found.append(merge)
    return found


def _have_same_runs(one: Merge, two: Merge) -> bool:
    names = [[run.name for run in merge.inputs] for merge in (one, two)]
    return names[0] == names[1] and one.whole == two.whole


def compact(
    reader: Reader, plan: Iterable[Merge], path: Path, expired: Expired | None = None
) -> list[MergeResult]:
    """Merge into one new run at `path`; the results are for `Manifest.advance`.

    A merge of all runs of a group drops tombstones and the rows that `expired` selects.
    """
    plan = list(plan)
    groups = reader.manifest.groups
    writer = RunWriter(path, reader.schema, groups)
    for merge in plan:
        runs = [reader.open(run) for run in merge.inputs]
        low = first_place(merge.groups.start, groups)
        for piece in merge_runs(runs, low, first_place(merge.groups.stop, groups)):
            kept = piece
            if merge.whole:
                live = piece.live
                kept = piece.filter(live if expired is None else live & ~expired(piece.values))
            writer.add(kept.places, kept.keys, kept.values, kept.live)
    run = writer.close(max((run.born for merge in plan for run in merge.inputs), default=0))
    return [MergeResult(run, m.groups, tuple(run.name for run in m.inputs)) for m in plan]
