"""Places of keys, as Spark computes them, and the groups that they fall into."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from onceflow.contract.schema import arrow_schema
from onceflow.errors import JobError
from onceflow.state.keys import (
    END,
    check_key,
    first_place,
    group_of,
    groups_of,
    places_of,
    task_ranges,
)


def place_of(values: Sequence[Any], types: Sequence[Any]) -> int:
    """The place of one key; types are those of Spark's JSON."""
    fields = [{"name": f"k{i}", "type": kind} for i, kind in enumerate(types)]
    schema = arrow_schema(json.dumps({"fields": fields}))
    arrays = [pa.array([value], field.type) for value, field in zip(values, schema, strict=True)]
    return int(places_of(pa.Table.from_arrays(arrays, schema=schema))[0])


UTC = dt.UTC
# What xxhash64 of Spark 4.2 gives, whole numbers cast to bigint.
BY_SPARK: list[tuple[list[Any], list[Any], int]] = [
    ([0], ["long"], -5252525462095825812),
    ([1], ["long"], -7001672635703045582),
    ([-1], ["long"], 3858142552250413010),
    ([42], ["long"], -6876166290308861218),
    ([2**63 - 1], ["long"], -3246596055638297850),
    ([-(2**63)], ["long"], -8619748838626508300),
    ([7], ["byte"], -2864211556195259663),
    ([-7], ["short"], -1663473129717591079),
    ([7], ["integer"], -2864211556195259663),
    ([True], ["boolean"], -6698625589789238999),
    ([False], ["boolean"], 3614696996920510707),
    ([dt.date(1970, 1, 1)], ["date"], 3614696996920510707),
    ([dt.date(2026, 11, 16)], ["date"], -4003261301158155361),
    ([dt.date(1900, 2, 3)], ["date"], -1737314299333118578),
    ([dt.datetime(2026, 11, 16, 12, 34, 56, 789012, UTC)], ["timestamp"], 7280151704829627033),
    ([dt.datetime(1900, 1, 1, tzinfo=UTC)], ["timestamp"], 155858819934112402),
    ([dt.datetime(2026, 11, 16, 12, 34, 56, 789012)], ["timestamp_ntz"], 7280151704829627033),
    ([Decimal("12345.67")], ["decimal(10,2)"], -430719971783359363),
    ([Decimal("-1.50")], ["decimal(10,2)"], -3700955262752989823),
    ([Decimal(10**18 - 1)], ["decimal(18,0)"], 2162198894918931945),
    ([Decimal("0.000")], ["decimal(38,3)"], -8959994473701255385),
    ([Decimal("-1.000")], ["decimal(38,3)"], 7239945642582462744),
    ([Decimal("0.127")], ["decimal(38,3)"], -5998106174972408993),
    ([Decimal("0.128")], ["decimal(38,3)"], 6715097930120473301),
    ([Decimal("-0.128")], ["decimal(38,3)"], -7898411661632158123),
    ([Decimal("-0.129")], ["decimal(38,3)"], -6459515886037897956),
    ([Decimal("12345678901234567890123456789012345.678")], ["decimal(38,3)"], -4207986725797954644),
    ([""], ["string"], -7444071767201028348),
    (["a"], ["string"], -8582455328737087284),
    (["abc"], ["string"], 1423657621850124518),
    (["abcd"], ["string"], -6810745876291105281),
    (["abcdefgh"], ["string"], 2470326616177429180),
    (["abcdefghijkl"], ["string"], 3897903351825168219),
    (["näßé ✓"], ["string"], 1699449102276822526),
    (["x" * 31], ["string"], -1716462135722163746),
    (["y" * 32], ["string"], 5202031258905353636),
    (["z" * 33], ["string"], -8411362631970189001),
    (["0123456789" * 10], ["string"], 6379203369694145893),
    ([b"\xff\x80\x01"], ["binary"], -570220732561121565),
    ([bytes(range(64))], ["binary"], -3582744155969569138),
    (["a", 1, dt.date(2026, 1, 1)], ["string", "long", "date"], -6493786485465505754),
    ([None, 1, None], ["string", "long", "date"], -7001672635703045582),
    (["b", None, None], ["string", "long", "date"], -6391946315847899181),
    ([None, None, None], ["string", "long", "date"], 42),
]


@pytest.mark.parametrize(("values", "types", "place"), BY_SPARK)
def test_a_place_is_what_spark_computes(values: list[Any], types: list[Any], place: int) -> None:
    assert place_of(values, types) == place


def test_many_keys_at_once_have_the_places_that_each_has_alone() -> None:
    texts = [None, "", "a", "bb", "x" * 40, "y" * 9, "a", "z" * 100]
    numbers = [5, None, 7, 8, None, 10, 7, 12]
    whole = pa.table({"s": texts, "n": pa.array(numbers, pa.int32())})
    chunked = pa.concat_tables([whole.slice(0, 3), whole.slice(3, 0), whole.slice(3)])
    alone = [place_of(key, ["string", "integer"]) for key in zip(texts, numbers, strict=True)]
    assert places_of(chunked).tolist() == alone
    assert places_of(whole.slice(0, 0)).tolist() == []


def test_a_key_column_that_is_widened_keeps_its_places() -> None:
    assert len({place_of([99], [kind]) for kind in ("byte", "short", "integer", "long")}) == 1


@pytest.mark.parametrize("groups", [1, 3, 7, 128, 1000])
def test_groups_are_equal_slices_of_places_in_their_order(groups: int) -> None:
    assert first_place(0, groups) == -END
    assert first_place(groups, groups) == END
    for group in range(groups):
        first, last = first_place(group, groups), first_place(group + 1, groups) - 1
        assert [group_of(first, groups), group_of(last, groups)] == [group, group]
        assert groups_of(np.array([first, last]), groups).tolist() == [group, group]


@pytest.mark.parametrize(("groups", "tasks"), [(128, 1), (128, 3), (128, 128), (4, 6), (1, 2)])
def test_tasks_share_all_groups_evenly(groups: int, tasks: int) -> None:
    ranges = task_ranges(groups, tasks)
    assert [group for part in ranges for group in part] == list(range(groups))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize("kind", ["byte", "long", "string", "binary", "date", "decimal(38,3)"])
def test_columns_that_compare_exactly_can_be_keys(kind: str) -> None:
    check_key("k", kind)


@pytest.mark.parametrize(
    ("kind", "fix"),
    [
        ("double", "cast price to decimal or string"),
        ({"type": "struct", "fields": []}, "take the fields of price"),
        ("interval day to second", "cast price to one of byte, short"),
    ],
)
def test_other_columns_are_refused_by_name_with_what_to_do(kind: Any, fix: str) -> None:
    with pytest.raises(JobError, match="price is") as refused:
        check_key("price", kind)
    assert fix in refused.value.hint
