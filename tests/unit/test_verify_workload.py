"""The rows that `onceflow verify` feeds, and the expected of the built-in jobs."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from onceflow.harness.builtin_catalog import JOBS, cases
from onceflow.harness.feed import BuiltIn
from onceflow.harness.workload import CLOSERS, CLOSING, DELAY, SCHEMA, Workload, table
from onceflow.log.segments import split_by_key

ROWS = 1_000


def test_a_row_follows_from_seed_and_number_alone() -> None:
    forwards = [Workload(7).row(number) for number in range(ROWS)]
    backwards = [Workload(7).row(number) for number in reversed(range(ROWS))]
    assert forwards == backwards[::-1]
    assert forwards != [Workload(8).row(number) for number in range(ROWS)]


def test_sequences_of_a_key_have_no_gap_and_repetitions_are_the_first_row_again() -> None:
    sequences, first = defaultdict(list), {}
    again = 0
    for number in range(ROWS):
        row = Workload(3).row(number)
        if row.again:
            again += 1
            before = first[row.id]
            assert (row.key, row.sequence, row.at, row.value) == (
                before.key, before.sequence, before.at, before.value,
            )  # fmt: skip
        else:
            sequences[row.key].append(row.sequence)
            first[row.id] = row
    assert again > ROWS / 50
    assert all(found == list(range(len(found))) for found in sequences.values())
    sizes = Counter({key: len(found) for key, found in sequences.items()}).most_common()
    assert sizes[0][1] > 5 * sizes[-1][1], "no key is frequent"


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_later_than_the_watermark_allows(seed: int) -> None:
    """Whatever the epochs: beyond it Spark's result would depend on them."""
    workload = Workload(seed)
    newest = workload.row(0).at
    for number in range(ROWS):
        row = workload.row(number)
        assert row.at > newest - DELAY
        newest = max(newest, row.at)


def test_the_table_has_the_columns_of_the_log() -> None:
    names = [column.split()[0] for column in SCHEMA.split(", ")]
    assert table([Workload(1).row(0)]).column_names == names


def test_the_input_ends_in_every_partition_of_its_log() -> None:
    """A partition that has not come so far would hold the watermark of keyed steps back."""
    source = BuiltIn(5)
    how = source.logs["in"]
    parts = split_by_key(source.last(20)["in"], how["key"], how["partitions"])
    assert [rows["at"].to_pylist() for rows in parts.values()] == [[CLOSING]] * how["partitions"]


def test_each_job_has_a_truth_that_counts_every_row() -> None:
    rows = list(BuiltIn(5).rows(20))
    total = len(rows)
    expected = {name: job.expected_results(rows, job.sinks[0]) for name, job in JOBS.items()}
    assert expected["echo"]["result/result"].rows.total() == total
    assert sum(count for _, count, _ in expected["sum"]["result/result"].rows) == total
    assert sum(
        count for _, _, count, _ in expected["windows"]["result/result"].rows
    ) == total - len(CLOSERS)
    assert expected["distinct"]["result/result"].rows.total() == sum(not row.again for row in rows)
    assert expected["join"]["result/result"].rows.total() == sum(row.again for row in rows)
    assert sum(t.rows.total() for t in expected["several"].values()) == total
    assert expected["dice"]["result/result"].total == (total, sum(row.value for row in rows))
    keyed = {"keyed": "sum", "timers": "windows", "expiring": "distinct", "steps": "dice"}
    assert all(expected[name] == expected[native] for name, native in keyed.items()), (
        "as Spark has it"
    )
    assert {name for name, job in JOBS.items() if job.keyed} == set(keyed)


def test_every_version_of_a_sum_may_be_seen_and_the_last_must_be() -> None:
    (expected,) = JOBS["sum"].expected_results(BuiltIn(5).rows(20), "log").values()
    assert expected.versions is not None
    assert set(expected.rows) < expected.versions


def test_few_faults_are_for_every_job_and_every_sink_many_for_all_of_them() -> None:
    few, many = cases(40), cases(1000)
    assert {job for job, _ in few} == set(JOBS) - {"topic"}
    assert {sinks for _, sinks in few} == {"files", "sqlite", "log", "all"}
    assert set(many) == {
        (job.name, sinks) for job in JOBS.values() for sinks in job.sinks
        if not job.servers(sinks)
    }  # fmt: skip
    assert cases(5, ["echo"], ["log"]) == [("echo", "log")]
    assert "several" not in {job for job, _ in cases(40, sinks=["files"])}, "it needs all three"


def test_a_server_is_needed_by_those_only_who_ask_for_it() -> None:
    assert not any(JOBS[job].servers(sinks) for job, sinks in cases(1000))
    asked = cases(12, sinks=["kafka", "postgres"])
    assert set(asked) == {
        (job.name, sinks) for job in JOBS.values() for sinks in job.sinks if job.servers(sinks)
    }
    assert ("several", "servers") in asked
    assert ("several", "servers") not in cases(12, sinks=["kafka"]), "it needs both"
    assert JOBS["several"].servers("servers") == {"kafka", "postgres"}
    assert JOBS["topic"].servers("kafka") == {"kafka"}


def test_rows_that_go_to_several_servers_are_shared_out_by_their_number() -> None:
    expected = JOBS["several"].expected_results(BuiltIn(5).rows(20), "servers")
    assert set(expected) == {"result/files", "result/kafka", "result/postgres"}
    assert all(row[0] % 3 == 1 for row in expected["result/kafka"].rows)
