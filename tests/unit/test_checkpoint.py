"""Spark's own files, read and corrected: hand-made checkpoints, as Spark 4.2 writes them."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from onceflow.errors import CheckpointRefused, Fenced, PlanChanged
from onceflow.spark.checkpoint import Checkpoint, advance_watermark, offset_after, parse_offsets
from onceflow.spark.file_source_log import SourceLog

METADATA = (
    '{"batchWatermarkMs":5000,"batchTimestampMs":1763200000000,'
    '"conf":{"spark.sql.shuffle.partitions":"2"}}'
)
OFFSETS = f'v2\n{METADATA}\nclicks:{{"logOffset":3}}\nlines:{{"topic":{{"0":7}}}}'


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


def put(path: Path, text: str, *, crc: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if crc:
        crc_of(path).write_bytes(b"crc\x00")
    return path


def crc_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.crc")


# ---------------------------------------------------------------- offsets


def test_offsets_are_read_by_source_name() -> None:
    metadata, offsets = parse_offsets(OFFSETS, "offsets/7")
    assert metadata["batchWatermarkMs"] == 5000
    assert offsets == {"clicks": {"logOffset": 3}, "lines": {"topic": {"0": 7}}}


def test_offsets_without_sources_are_read() -> None:
    assert parse_offsets(f"v2\n{METADATA}", "offsets/7")[1] == {}


def test_offsets_that_do_not_name_their_sources_are_refused() -> None:
    with pytest.raises(CheckpointRefused, match="/x/offsets/7 has offset log format v1"):
        parse_offsets(f'v1\n{METADATA}\n{{"logOffset":3}}', "/x/offsets/7")


def test_offsets_that_are_cut_anywhere_are_planned_anew() -> None:
    """Never a wrong offset: what can be read is a part of it, whole source by whole source."""
    whole = parse_offsets(OFFSETS, "offsets/7")
    for length in range(len(OFFSETS)):
        try:
            metadata, offsets = parse_offsets(OFFSETS[:length], "offsets/7")
        except PlanChanged:
            continue
        assert metadata == whole[0]
        assert offsets.items() <= whole[1].items()
        assert offsets != whole[1]


def test_offsets_come_back_as_they_were_written(checkpoint: Checkpoint) -> None:
    assert checkpoint.offsets(7) is None
    checkpoint.set_offsets(7, OFFSETS)
    assert checkpoint.offsets(7) == OFFSETS


def test_a_stale_crc_goes_with_what_it_was_of(checkpoint: Checkpoint) -> None:
    """Hadoop would refuse the corrected file for the checksum of the old one."""
    path = put(checkpoint.root / "offsets" / "7", "what a paused driver wrote", crc=True)
    checkpoint.set_offsets(7, OFFSETS)
    assert path.read_text() == OFFSETS
    assert os.listdir(path.parent) == ["7"]


def test_right_offsets_are_left_untouched(checkpoint: Checkpoint) -> None:
    path = put(checkpoint.root / "offsets" / "7", OFFSETS)
    before = path.stat()
    checkpoint.set_offsets(7, OFFSETS)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_offsets_above_the_last_decision_are_dropped(checkpoint: Checkpoint) -> None:
    for epoch in (0, 1, 2, 9, 10, 11):
        put(checkpoint.root / "offsets" / str(epoch), OFFSETS, crc=True)
    put(checkpoint.root / "offsets" / ".12.tmp", "half written")
    assert checkpoint.drop_offsets_above(9) == [10, 11]
    left = sorted(n for n in os.listdir(checkpoint.root / "offsets") if n[0] != ".")
    assert left == ["0", "1", "2", "9"]
    assert not crc_of(checkpoint.root / "offsets" / "11").exists()
    assert checkpoint.drop_offsets_above(-1) == [0, 1, 2, 9]
    assert Checkpoint(checkpoint.root / "none").drop_offsets_above(-1) == []


# ---------------------------------------------------------------- commits and identity


def test_a_commit_is_written_as_spark_writes_it(checkpoint: Checkpoint) -> None:
    put(checkpoint.root / "commits" / "3", "old", crc=True)
    checkpoint.set_commit(3, 5000, {"0": [["a"], ["b"]]})
    text = (checkpoint.root / "commits" / "3").read_text()
    assert text == 'v2\n{"nextBatchWatermarkMs":5000,"stateUniqueIds":{"0":[["a"],["b"]]}}'
    assert os.listdir(checkpoint.root / "commits") == ["3"]
    checkpoint.set_commit(4, 0, {})
    text = (checkpoint.root / "commits" / "4").read_text()
    assert text == 'v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}'


def test_committed_epochs_are_listed_in_order(checkpoint: Checkpoint) -> None:
    assert checkpoint.committed() == []
    for name in ("10", "9", "2", ".11.crc", "x"):
        put(checkpoint.root / "commits" / name, "v2\n{}")
    assert checkpoint.committed() == [2, 9, 10]


def test_the_query_id_is_kept(checkpoint: Checkpoint) -> None:
    assert checkpoint.query_id() is None
    checkpoint.set_query_id("0f8fad5b-d9cb-469f-a165-70867728950e")
    assert checkpoint.query_id() == "0f8fad5b-d9cb-469f-a165-70867728950e"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"no":1}', "null"])
def test_a_query_id_that_cannot_be_read_is_refused(checkpoint: Checkpoint, text: str) -> None:
    put(checkpoint.root / "metadata", text)
    with pytest.raises(CheckpointRefused, match="metadata is not readable"):
        checkpoint.query_id()


# ---------------------------------------------------------------- watermark and ranges


def test_an_epoch_without_data_has_the_next_watermark_and_the_same_offsets() -> None:
    after = advance_watermark(OFFSETS, 6000, 1_763_200_001_000)
    assert after is not None
    metadata, offsets = parse_offsets(after, "")
    assert offsets == parse_offsets(OFFSETS, "")[1]
    assert metadata == {
        "batchWatermarkMs": 6000,
        "batchTimestampMs": 1_763_200_001_000,
        "conf": {"spark.sql.shuffle.partitions": "2"},
    }
    assert after.split("\n")[2:] == OFFSETS.split("\n")[2:]


@pytest.mark.parametrize("watermark", [0, 4999, 5000])
def test_a_watermark_that_did_not_move_needs_no_epoch(watermark: int) -> None:
    assert advance_watermark(OFFSETS, watermark, 1) is None


@pytest.mark.parametrize(
    ("start", "end", "after"),
    [
        ({}, {}, False),
        ({"a": {"logOffset": 3}}, {"a": {"logOffset": 3}}, False),
        ({"a": {"logOffset": 3}}, {"a": {"logOffset": 4}}, False),
        ({"a": {"logOffset": 4}}, {"a": {"logOffset": 3}}, True),
        ({"k": {"t": {"0": 7, "1": 9}}}, {"k": {"t": {"0": 8, "1": 8}}}, True),
        ({"k": {"t": {"0": 7}}}, {"k": {"t": {"0": 8, "1": 0}}}, False),
        ({"a": {"x": 1}}, {"b": {"x": 0}}, False),
        ({"a": 5}, {"a": 4}, True),
        ({"a": 4.5}, {"a": 5}, False),
        ({"a": "2026"}, {"a": "2025"}, False),
        ({"a": {"x": 1}}, {"a": 0}, False),
    ],
)
def test_a_range_that_ends_before_it_begins_is_seen(start: Any, end: Any, after: bool) -> None:
    assert offset_after(start, end) is after


# ---------------------------------------------------------------- the file source's log


def line(number: int, file: str = "") -> str:
    path = f"file:///in/{file or number}.json"
    return json.dumps({"path": path, "timestamp": 1, "batchId": number}, separators=(",", ":"))


def sources(checkpoint: Checkpoint, name: str = "lines") -> Path:
    return checkpoint.root / "sources" / name


def written(checkpoint: Checkpoint, last: int) -> None:
    """What Spark has written when it read one file for each offset up to `last`."""
    for number in range(last + 1):
        if (number + 1) % 10 == 0:
            text = "\n".join(["v1", *(line(n) for n in range(number + 1))])
            put(sources(checkpoint) / f"{number}.compact", text)
        else:
            put(sources(checkpoint) / str(number), f"v1\n{line(number)}")


def decided(*numbers: int) -> list[dict[str, dict[str, list[str]]]]:
    """The source entries of decisions, one for each number."""
    return [{"lines": {str(n): [line(n)]}} for n in numbers]


def nobody() -> None:
    """Leads after us."""


def restore(checkpoint: Checkpoint, last: int, *numbers: int) -> None:
    end = {"lines": {"logOffset": last}}
    checkpoint.set_sources(decided(*(numbers or (last - 1, last))), end, 10, nobody)


def state_of(checkpoint: Checkpoint) -> dict[str, tuple[str, int, int]]:
    return {
        path.name: (path.read_text(), path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sources(checkpoint).iterdir()
    }


def test_entries_are_found_in_plain_files(checkpoint: Checkpoint) -> None:
    written(checkpoint, 3)
    found = checkpoint.source_entries(
        {"lines": {"logOffset": 1}}, {"lines": {"logOffset": 3}, "rate": {"offset": 5}}
    )
    assert found == {"lines": {"2": [line(2)], "3": [line(3)]}}


def test_the_first_range_of_a_source_begins_with_entry_zero(checkpoint: Checkpoint) -> None:
    written(checkpoint, 1)
    end = {"lines": {"logOffset": 1}}
    both = {"lines": {"0": [line(0)], "1": [line(1)]}}
    assert checkpoint.source_entries({}, end) == both
    assert checkpoint.source_entries({"lines": None}, end) == both


def test_entries_are_found_in_compact_files(checkpoint: Checkpoint) -> None:
    written(checkpoint, 9)
    found = checkpoint.source_entries({"lines": {"logOffset": 8}}, {"lines": {"logOffset": 9}})
    assert found == {"lines": {"9": [line(9)]}}


def test_an_entry_of_several_files_is_found_whole(checkpoint: Checkpoint) -> None:
    put(sources(checkpoint) / "0", "\n".join(["v1", line(0, "a"), line(0, "b")]))
    found = checkpoint.source_entries({}, {"lines": {"logOffset": 0}})
    assert found == {"lines": {"0": [line(0, "a"), line(0, "b")]}}


def test_an_epoch_without_new_files_has_no_entries(checkpoint: Checkpoint) -> None:
    written(checkpoint, 3)
    at = {"lines": {"logOffset": 3}}
    assert checkpoint.source_entries(at, at) == {"lines": {}}


def test_an_entry_that_is_gone_while_it_is_planned_is_planned_anew(checkpoint: Checkpoint) -> None:
    written(checkpoint, 2)
    with pytest.raises(PlanChanged, match=r"sources/lines/3 is missing"):
        checkpoint.source_entries({"lines": {"logOffset": 2}}, {"lines": {"logOffset": 3}})


@pytest.mark.parametrize("last", [0, 3, 8, 9, 10, 18, 19, 20, 25])
def test_a_log_that_is_right_is_left_untouched(checkpoint: Checkpoint, last: int) -> None:
    written(checkpoint, last)
    before = state_of(checkpoint)
    restore(checkpoint, last, *range(max(0, last - 3), last + 1))
    restore(checkpoint, last, last)
    assert state_of(checkpoint) == before


def spoiled(path: Path, how: str) -> None:
    text = path.read_text()
    match how:
        case "missing":
            path.unlink()
        case "overwritten":
            path.write_text(text.replace("file:///in/", "file:///in/other-"))
        case "torn":
            path.write_text(text[:-9])
        case "empty":
            path.write_text("")
        case "only its header":
            path.write_text("v1\n")
        case "torn in a character":
            path.write_bytes(text.replace("/in/", "/in/ä").encode().partition(b"\xa4")[0])
        case "with one file too many":
            number = path.name.removesuffix(".compact")
            path.write_text(f"{text}\n{line(int(number), 'extra')}")


HOW = [
    "missing",
    "overwritten",
    "torn",
    "empty",
    "only its header",
    "torn in a character",
    "with one file too many",
]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("last", [0, 1, 12, 13])
def test_a_plain_entry_is_corrected_from_the_decision(
    checkpoint: Checkpoint, last: int, how: str
) -> None:
    written(checkpoint, last)
    before = {name: text for name, (text, *_) in state_of(checkpoint).items()}
    spoiled(sources(checkpoint) / str(last), how)
    crc_of(sources(checkpoint) / str(last)).write_bytes(b"stale")

    restore(checkpoint, last, *range(max(0, last - 1), last + 1))

    after = {name: text for name, (text, *_) in state_of(checkpoint).items()}
    assert after == before


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("last", "compact"), [(9, 9), (19, 19), (20, 19)])
def test_a_compact_entry_is_corrected_from_the_decisions_or_refused(
    checkpoint: Checkpoint, last: int, compact: int, how: str
) -> None:
    """A line of it that is torn may be of an entry that no decision has: a clear error."""
    written(checkpoint, last)
    path = sources(checkpoint) / f"{compact}.compact"
    right = sorted(path.read_text().split("\n"))
    spoiled(path, how)
    crc_of(path).write_bytes(b"stale")

    if how.startswith("torn"):
        with contextlib.suppress(CheckpointRefused):
            restore(checkpoint, last, *range(last + 1))
        return
    restore(checkpoint, last, *range(last + 1))
    assert sorted(path.read_text().split("\n")) == right
    assert not crc_of(path).exists()
    assert not (sources(checkpoint) / str(compact)).exists()


@pytest.mark.parametrize("how", [how for how in HOW if how != "overwritten"])
def test_a_compact_entry_of_which_decisions_have_only_the_end_is_whole_or_refused(
    checkpoint: Checkpoint, how: str
) -> None:
    """Decisions are retained for the newest epochs only; files that it forgot are read again."""
    written(checkpoint, 19)
    path = sources(checkpoint) / "19.compact"
    right = sorted(path.read_text().split("\n"))
    spoiled(path, how)
    try:
        restore(checkpoint, 19, 18, 19)
    except CheckpointRefused:
        return
    assert sorted(path.read_text().split("\n")) == right


def test_the_last_entry_of_a_compact_file_is_corrected_and_the_older_ones_kept(
    checkpoint: Checkpoint,
) -> None:
    """Decisions are retained for the newest epochs only."""
    written(checkpoint, 19)
    compact = sources(checkpoint) / "19.compact"
    right = sorted(compact.read_text().split("\n"))
    compact.write_text(compact.read_text().replace("/in/19.", "/in/other-19."))
    restore(checkpoint, 19, 18, 19)
    assert sorted(compact.read_text().split("\n")) == right


def test_a_missing_compact_file_is_made_from_the_older_one_and_the_entries(
    checkpoint: Checkpoint,
) -> None:
    written(checkpoint, 19)
    compact = sources(checkpoint) / "19.compact"
    right = compact.read_text()
    compact.unlink()
    restore(checkpoint, 19, 18, 19)
    assert compact.read_text() == right


def test_a_missing_compact_file_that_cannot_be_made_again_is_refused(
    checkpoint: Checkpoint,
) -> None:
    """The entries that it held are gone, so the files of them would be read again."""
    written(checkpoint, 19)
    for name in ("19.compact", "9.compact", "12", "11"):
        (sources(checkpoint) / name).unlink()
    with pytest.raises(CheckpointRefused):
        restore(checkpoint, 19, 18, 19)


def test_a_compact_file_that_lost_older_entries_is_refused(checkpoint: Checkpoint) -> None:
    """It was cut at the end of a line. What it lost is in no decision any more."""
    written(checkpoint, 19)
    compact = sources(checkpoint) / "19.compact"
    compact.write_text("\n".join(compact.read_text().split("\n")[:6]))
    with pytest.raises(CheckpointRefused, match=r"19.compact"):
        restore(checkpoint, 19, 18, 19)


def test_entries_above_the_last_decision_are_removed(checkpoint: Checkpoint) -> None:
    written(checkpoint, 21)
    crc_of(sources(checkpoint) / "21").write_bytes(b"crc")
    restore(checkpoint, 18, 17, 18)
    left = {name.removesuffix(".compact") for name in os.listdir(sources(checkpoint))}
    assert left == {str(n) for n in range(19)}


def test_without_a_decision_nothing_of_a_file_source_stays(checkpoint: Checkpoint) -> None:
    written(checkpoint, 3)
    checkpoint.set_sources([], {}, 10, nobody)
    assert os.listdir(sources(checkpoint)) == []


def test_what_a_successor_writes_meanwhile_stays(checkpoint: Checkpoint) -> None:
    """The driver is paused between its last look at the log and the removal."""
    written(checkpoint, 3)

    def overtaken() -> None:
        put(sources(checkpoint) / "2", f"v1\n{line(2, 'other')}")
        put(sources(checkpoint) / "4", f"v1\n{line(4)}")

    checkpoint.set_sources(decided(0, 1), {"lines": {"logOffset": 1}}, 10, overtaken)
    assert sorted(os.listdir(sources(checkpoint))) == ["0", "1", "2", "4"]
    assert "other" in (sources(checkpoint) / "2").read_text()


def test_who_is_fenced_removes_no_entry(checkpoint: Checkpoint) -> None:
    written(checkpoint, 3)

    def fenced() -> None:
        raise Fenced("another driver leads")

    with pytest.raises(Fenced):
        checkpoint.set_sources(decided(0, 1), {"lines": {"logOffset": 1}}, 10, fenced)
    assert len(os.listdir(sources(checkpoint))) == 4


def test_the_files_of_other_sources_are_left_alone(checkpoint: Checkpoint) -> None:
    path = put(sources(checkpoint, "kafka") / "0", 'v1\n{"topic":{"0":5}}', crc=True)
    checkpoint.set_sources([], {}, 10, nobody)
    checkpoint.set_sources([], {"kafka": {"topic": {"0": 9}}}, 10, nobody)
    assert path.read_text() == 'v1\n{"topic":{"0":5}}'
    assert crc_of(path).exists()


def test_a_source_whose_folder_is_gone_is_written_anew(checkpoint: Checkpoint) -> None:
    restore(checkpoint, 1, 0, 1)
    assert (sources(checkpoint) / "0").read_text() == f"v1\n{line(0)}"
    assert (sources(checkpoint) / "1").read_text() == f"v1\n{line(1)}"


def test_several_sources_are_restored_each_from_its_own(checkpoint: Checkpoint) -> None:
    for name in ("a", "b"):
        put(sources(checkpoint, name) / "0", f"v1\n{line(0, name)}")
        put(sources(checkpoint, name) / "1", "torn")
    entries = [{n: {"0": [line(0, n)], "1": [line(1, n)]} for n in ("a", "b")}]
    checkpoint.set_sources(entries, {"a": {"logOffset": 1}, "b": {"logOffset": 0}}, 10, nobody)
    assert (sources(checkpoint, "a") / "1").read_text() == f"v1\n{line(1, 'a')}"
    assert os.listdir(sources(checkpoint, "b")) == ["0"]


def test_the_order_of_files_in_an_entry_does_not_matter(checkpoint: Checkpoint) -> None:
    path = put(sources(checkpoint) / "0", "\n".join(["v1", line(0, "b"), line(0, "a")]))
    before = path.stat().st_mtime_ns
    entries = [{"lines": {"0": [line(0, "a"), line(0, "b")]}}]
    checkpoint.set_sources(entries, {"lines": {"logOffset": 0}}, 10, nobody)
    assert path.stat().st_mtime_ns == before


def test_another_compact_interval_is_followed(checkpoint: Checkpoint) -> None:
    end = {"lines": {"logOffset": 3}}
    for number in range(4):
        put(sources(checkpoint) / str(number), f"v1\n{line(number)}")
    checkpoint.set_sources(decided(0, 1, 2, 3), end, 2, nobody)
    log = SourceLog(sources(checkpoint))
    assert [log.entry(n) for n in (0, 2, 3)] == [[line(0)], [line(2)], [line(3)]]
    assert (sources(checkpoint) / "3.compact").exists()
    assert not (sources(checkpoint) / "3").exists()


# ---------------------------------------------------------------- state


def state(checkpoint: Checkpoint, *parts: str) -> Path:
    return put(checkpoint.root.joinpath("state", *parts), "state")


def test_the_state_of_an_epoch_is_found(checkpoint: Checkpoint) -> None:
    """Epoch 4 writes version 5. A changelog, a snapshot, or both; and their checksums."""
    files = [
        state(checkpoint, "0", "0", "5_a.changelog"),
        state(checkpoint, "0", "0", "5_a.changelog.crc"),
        state(checkpoint, "0", "1", "5_b.zip"),
    ]
    state(checkpoint, "0", "0", "4_z.changelog")
    state(checkpoint, "0", "0", "5_of another attempt.changelog")
    state(checkpoint, "0", "_metadata", "schema")
    assert sorted(checkpoint.state_files(4, {"0": [["a"], ["b"]]})) == sorted(files)


def test_the_state_of_a_join_is_found_in_its_four_stores(checkpoint: Checkpoint) -> None:
    stores = [f"{side}-{what}" for side in ("left", "right") for what in ("keyToNum", "keyWith")]
    files = [state(checkpoint, "0", "0", s, f"1_{i}.changelog") for i, s in enumerate(stores)]
    assert sorted(checkpoint.state_files(0, {"0": [["0", "1", "2", "3"]]})) == sorted(files)


def test_state_that_is_gone_is_refused_and_named(checkpoint: Checkpoint) -> None:
    state(checkpoint, "0", "0", "5_a.changelog")
    state(checkpoint, "1", "0", "5_c.changelog")
    wanted = {"0": [["a"]], "1": [["c"], ["d"]]}
    with pytest.raises(CheckpointRefused, match="state 5_d of operator 1, partition 1 is missing"):
        checkpoint.state_files(4, wanted)


def test_a_query_without_state_has_no_state_files(checkpoint: Checkpoint) -> None:
    assert checkpoint.state_files(4, {}) == []


def test_all_files_of_an_epoch_are_named_for_fsync(checkpoint: Checkpoint) -> None:
    written(checkpoint, 9)
    checkpoint.set_offsets(4, OFFSETS)
    file = state(checkpoint, "0", "0", "5_a.changelog")
    end = {"lines": {"logOffset": 9}, "rate": 5}
    assert checkpoint.epoch_files(4, end, {"0": [["a"]]}) == [
        checkpoint.root / "offsets" / "4",
        sources(checkpoint) / "9.compact",
        file,
    ]
