"""Merges: the state stays what it is, groups have few runs, and an epoch's share is bounded."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from stored import scanned, state_of, write_run

from onceflow.state.compact import MOST, Merge, compact, plan_merges
from onceflow.state.manifest import Manifest, MergeResult, Run

pytestmark = pytest.mark.usefixtures("no_fsync")


def run(name: str, counts: list[int]) -> Run:
    return Run(name, sum(counts), 100, 7, 1, 0, tuple(counts), {})


def stacked(*sizes: int, groups: int = 1) -> Manifest:
    """Runs of these sizes in each group, the newest first."""
    manifest = Manifest(0, groups)
    for epoch, size in enumerate(reversed(sizes), 1):
        manifest = manifest.advance(epoch, [run(f"r{epoch}", [size] * groups)])
    return manifest


def test_the_newest_runs_that_do_not_grow_are_merged() -> None:
    everything = range(0, 1)
    new = run("new", [10])
    assert plan_merges(stacked(10, 10), new, everything) == []
    [merge] = plan_merges(stacked(10, 10, 10, 500), new, everything)
    assert ([r.name for r in merge.inputs], merge.whole) == (["new", "r4", "r3", "r2"], False)
    [merge] = plan_merges(stacked(10, 10, 10, 40), new, everything)
    assert (len(merge.inputs), merge.whole) == (5, True)
    assert plan_merges(stacked(10, 10, 10), None, everything) == []


def test_small_runs_are_merged_in_all_groups_at_once_and_end() -> None:
    manifest = stacked(10, 10, 10, groups=4)
    manifest = manifest.advance(9, [Run("x", 10, 1, 1, 9, 2, (10,), {})])
    new = run("new", [10, 0, 10, 10])
    merges = plan_merges(manifest, new, range(0, 4))
    assert [(m.groups, len(m.inputs), m.whole) for m in merges] == [
        (range(0, 1), 4, True), (range(1, 2), 3, True), (range(2, 3), 5, True),
        (range(3, 4), 4, True),
    ]  # fmt: skip


def test_above_the_budget_the_neediest_groups_come_first() -> None:
    manifest = stacked(10, 10, 10, groups=4)
    manifest = manifest.advance(9, [Run("x", 10, 1, 1, 9, 2, (10,), {})])
    new = run("new", [10] * 4)
    assert [m.groups for m in plan_merges(manifest, new, range(0, 4), 49)] == [range(0, 1)]
    assert [m.groups for m in plan_merges(manifest, new, range(0, 4), 89)] == [range(2, 3)]
    assert [m.groups for m in plan_merges(manifest, new, range(0, 4), 92)] == [
        range(0, 1), range(2, 3),
    ]  # fmt: skip
    assert [m.groups for m in plan_merges(manifest, new, range(3, 4))] == [range(3, 4)]


def test_a_group_that_has_waited_long_is_merged_above_the_budget() -> None:
    new = run("new", [10, 10])
    assert plan_merges(stacked(*[10] * (MOST - 1), groups=2), new, range(0, 2), 5) == []
    [merge] = plan_merges(stacked(*[10] * MOST, groups=2), new, range(0, 2), 5)
    assert merge.groups == range(0, 1)


@pytest.mark.parametrize("rows", [16, 200])
def test_runs_of_a_group_and_writes_of_a_row_grow_as_the_logarithm(rows: int) -> None:
    manifest, written, most, epochs = Manifest(0, 4), 0, 0, 1000
    for epoch in range(1, epochs + 1):
        new = run(f"n{epoch}", [rows // 4] * 4)
        done = []
        for merge in plan_merges(manifest, new, range(0, 4), 4 * rows):
            counts = [sum(r.count(group) for r in merge.inputs) for group in merge.groups]
            written += sum(counts)
            into = Run(f"m{epoch}-{merge.groups.start}", sum(counts), 1, 1, epoch,
                       merge.groups.start, tuple(counts), {})  # fmt: skip
            done.append(MergeResult(into, merge.groups, tuple(r.name for r in merge.inputs)))
        manifest = manifest.advance(epoch, [new], done)
        most = max(most, *(len(manifest.stack(group)) for group in range(4)))
    assert most <= MOST + math.log2(epochs)
    assert written <= epochs * rows * math.log2(epochs)


def test_tombstones_and_expired_rows_go_when_all_runs_of_a_group_take_part(tmp_path: Path) -> None:
    manifest = Manifest(0, 1)
    epochs = [
        {(n,): (n, None) for n in range(100)}, {(1,): None, (2,): (-5, None)}, {(3,): None},
        {(4,): (-4, None), (5,): (50, 3)},
    ]  # fmt: skip
    for epoch, rows in enumerate(epochs, 1):
        made = write_run(tmp_path / f"{epoch}.arrow", rows, born=epoch, groups=1)
        manifest = manifest.advance(epoch, [made])
    reader = state_of(tmp_path, manifest)
    before = scanned(reader)

    def negative(values: pa.Table) -> np.ndarray:
        return values["total"].to_numpy() < 0

    tail = [run.name for run in manifest.stack(0)[:3]]
    done = compact(reader, _merges(manifest, 3), tmp_path / "part.arrow", negative)
    assert [m.inputs for m in done] == [tuple(tail)]
    partly = manifest.advance(5, [], done)
    assert scanned(state_of(tmp_path, partly)) == before
    assert done[0].run is not None
    assert (done[0].run.rows, done[0].run.born) == (5, 4), "they still hide what is older"

    reader = state_of(tmp_path, partly)
    done = compact(reader, _merges(partly, 2), tmp_path / "all.arrow", negative)
    wholly = partly.advance(6, [], done)
    left = {key: row for key, row in before.items() if row[0] >= 0}
    assert scanned(state_of(tmp_path, wholly)) == left
    assert wholly.counts() == [len(left)]


def test_a_group_of_which_nothing_is_left_has_no_run(tmp_path: Path) -> None:
    manifest = Manifest(0, 1)
    for epoch, rows in enumerate([{(1,): (1, None)}, {(1,): None}], 1):
        made = write_run(tmp_path / f"{epoch}.arrow", rows, born=epoch, groups=1)
        manifest = manifest.advance(epoch, [made])
    done = compact(state_of(tmp_path, manifest), _merges(manifest, 2), tmp_path / "m.arrow")
    after = manifest.advance(3, [], done)
    assert (done[0].run, after.entries) == (None, ())
    assert not (tmp_path / "m.arrow").exists()
    assert scanned(state_of(tmp_path, after)) == {}


def _merges(manifest: Manifest, number: int) -> list[Merge]:
    stack = manifest.stack(0)
    return [Merge(range(0, 1), tuple(stack[:number]), number == len(stack))]
