"""The store against a plain dict, through whatever can happen to it."""

from __future__ import annotations

import itertools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from stored import Key, find_unreachable, looked_up, placed, plain, scanned, write_run

from onceflow.state import compact as compacting
from onceflow.state import runs
from onceflow.state.compact import compact, plan_merges
from onceflow.state.keys import END, group_of, task_ranges
from onceflow.state.manifest import Manifest, MergeResult, Run
from onceflow.state.runs import StoreSchema
from onceflow.state.store import Reader

VALUES = pa.schema([("total", pa.int64()), ("wake", pa.timestamp("us", "UTC"))])
KINDS: dict[str, tuple[pa.Schema, list[Key]]] = {
    "long": (pa.schema([("k", pa.int64())]), [(n,) for n in range(-20, 20)]),
    "string": (
        pa.schema([("k", pa.string())]), [(None,), ("",), *((f"k{n}" * 5,) for n in range(38))],
    ),
    "two columns": (
        pa.schema([("k", pa.string()), ("l", pa.int32())]),
        list(itertools.product((None, "a", "b", "c"), (None, *range(9)))),
    ),
}  # fmt: skip
GROUPS = 6
State = dict[Key, tuple[Any, ...]]


class World:
    """A store and what it should hold, after each epoch that can be gone back to."""

    def __init__(self, folder: Path, kind: str, modulo: int, seed: int) -> None:
        keys, self.universe = KINDS[kind]
        self.folder, self.modulo, self.dice = folder, modulo, random.Random(seed)
        self.schema = StoreSchema(keys, VALUES, ("wake",))
        self.history: list[tuple[Manifest, State]] = [(Manifest(0, GROUPS), {})]
        self.names = (f"{n}.arrow" for n in itertools.count())

    def epoch(self, tasks: int, failures: int, budget: int | None) -> None:
        manifest, state = self.history[-1]
        for attempt in range(failures + 1):
            # A replay may do something else than the attempt that failed.
            changes = self.changes(state)
            outcome = [
                self.task(manifest, groups, changes, budget)
                for groups in task_ranges(GROUPS, tasks)
            ]
            if attempt < failures:
                continue
            merged = [part for _, parts in outcome for part in parts]
            after = manifest.advance(manifest.epoch + 1, [run for run, _ in outcome], merged)
            after.write(self.folder, f"{after.epoch}.json")
            new = {k: v for k, v in {**state, **changes}.items() if v is not None}
            self.history.append((Manifest.read(self.folder / f"{after.epoch}.json"), new))

    def changes(self, state: State) -> dict[Key, tuple[Any, ...] | None]:
        keys = self.dice.sample(self.universe, self.dice.choice([0, 1, 5, len(self.universe)]))
        return {
            key: None if key in state and self.dice.random() < 0.4
            else (self.dice.randrange(100), self.dice.choice([None, *range(12)]))
            for key in keys
        }  # fmt: skip

    def task(
        self, manifest: Manifest, groups: range, changes: dict[Key, Any], budget: int | None
    ) -> tuple[Run | None, list[MergeResult]]:
        places = dict(zip(changes, placed(list(changes), self.schema, self.modulo), strict=True))
        mine = {k: v for k, v in changes.items() if group_of(places[k], GROUPS) in groups}
        new = write_run(
            self.folder / next(self.names), mine, born=manifest.epoch + 1, schema=self.schema,
            groups=GROUPS, modulo=self.modulo,
        )  # fmt: skip
        plan = plan_merges(manifest, new, groups, budget)
        reader = Reader(self.folder, manifest, self.schema, groups)
        merged = compact(reader, plan, self.folder / next(self.names)) if plan else []
        assert (
            budget is None
            or len(plan) <= 1
            or budget >= sum(run.count(g) for m in plan for run in m.inputs for g in m.groups)
        )
        return new, [MergeResult.from_json(json.loads(json.dumps(m.to_json()))) for m in merged]

    def roll_back(self, epochs: int) -> None:
        del self.history[max(1, len(self.history) - epochs) :]

    def sweep(self) -> None:
        for path in find_unreachable(self.folder, [manifest for manifest, _ in self.history]):
            path.unlink()

    def check(self, tasks: int) -> None:
        manifest, state = self.history[-1]
        whole = Reader(self.folder, manifest, self.schema)
        asked = self.dice.sample(self.universe, self.dice.randrange(len(self.universe)))
        found = looked_up(whole, asked, self.modulo)
        assert found == {key: state[key] for key in asked if key in state}
        readers = [
            Reader(self.folder, manifest, self.schema, part) for part in task_ranges(GROUPS, tasks)
        ]
        assert [kv for r in readers for kv in scanned(r).items()] == list(scanned(whole).items())
        assert scanned(whole) == state
        until, most = self.dice.randrange(-1, 13), self.dice.choice([1, 3, 100])
        due = sorted(map(repr, self.due(whole, until, most)))
        expected = [k for k, (_, wake) in state.items() if wake is not None and wake <= until]
        assert due == sorted(map(repr, expected))
        later = [wake for _, wake in state.values() if wake is not None and wake > until]
        next_due = whole.find_next_due("wake", until)
        assert next_due is not None or not later
        assert next_due is None or until < next_due <= min(later, default=next_due)

    def due(self, reader: Reader, until: int, most: int) -> list[Key]:
        found, low = [], -END
        while low < END:
            places, keys, reached = reader.find_due("wake", until, low, END, most)
            assert low < reached
            assert all(low <= place < reached for place in places.tolist())
            found += plain(keys)
            low = reached
        return found


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("epoch"), st.integers(1, 4), st.sampled_from([0, 0, 0, 1, 2]),
            st.sampled_from([0, 10, 40, None]),
        ),
        st.tuples(st.just("roll back"), st.integers(1, 5)),
        st.tuples(st.just("sweep")),
    ),
    min_size=5,
    max_size=30,
)  # fmt: skip


@pytest.mark.usefixtures("no_fsync")
@settings(
    max_examples=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    kind=st.sampled_from(sorted(KINDS)),
    modulo=st.sampled_from([0, 0, 7, 2]),
    seed=st.integers(0, 1 << 32),
    steps=STEPS,
)
@example(kind="long", modulo=2, seed=1, steps=[("epoch", 2, 0, 0)] * 40)
@example(kind="two columns", modulo=0, seed=2, steps=[("epoch", 3, 1, None)] * 30)
def test_the_store_is_a_dict_through_failures_merges_rescaling_and_rollback(
    kind: str, modulo: int, seed: int, steps: list[tuple[Any, ...]]
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(runs, "BLOCK_ROWS", 4)
        patch.setattr(compacting, "FEWEST", 2)
        patch.setattr(compacting, "MOST", 6)
        world = World(Path(folder), kind, modulo, seed)
        for step, *how in steps:
            getattr(world, step.replace(" ", "_"))(*how)
            world.check(tasks=world.dice.randrange(1, 5))
