"""Manifests: which run counts where, through merges, and on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onceflow.errors import Damaged
from onceflow.state.manifest import Manifest, MergeResult, Run


def run(name: str, counts: list[int], first: int = 0, born: int = 1) -> Run:
    return Run(name, sum(counts), 100, 7, born, first, tuple(counts), {"wake": None})


def names(manifest: Manifest, group: int) -> list[str]:
    return [run.name for run in manifest.stack(group)]


EMPTY = Manifest(0, 4)


def test_a_run_serves_the_groups_that_it_has_rows_of() -> None:
    manifest = EMPTY.advance(1, [run("a", [1, 0, 2, 1]), None]).advance(2, [run("b", [5], 2)])
    assert [names(manifest, g) for g in range(4)] == [["a"], [], ["b", "a"], ["a"]]
    assert manifest.counts() == [1, 0, 7, 1]
    assert manifest.bytes() == 200
    assert manifest.epoch == 2


def test_a_merged_run_stands_where_its_inputs_stood() -> None:
    manifest = EMPTY
    for epoch, name in enumerate("abcd", 1):
        manifest = manifest.advance(epoch, [run(name, [1, 1, 1, 1])])
    new = run("m", [2, 2], 1)
    after = manifest.advance(
        5, [run("e", [1, 1, 1, 1])], [MergeResult(new, range(1, 3), ("c", "b"))]
    )
    assert names(after, 0) == ["e", "d", "c", "b", "a"]
    assert names(after, 1) == names(after, 2) == ["e", "d", "m", "a"]
    assert after.run_names() == set("abcdem")
    assert names(manifest, 1) == ["d", "c", "b", "a"], "an older manifest does not change"


def test_a_run_that_serves_no_group_is_not_needed() -> None:
    manifest = EMPTY.advance(1, [run("a", [1, 1])]).advance(2, [run("b", [1, 1])])
    after = manifest.advance(3, [], [MergeResult(run("m", [1, 1]), range(0, 2), ("b", "a"))])
    assert after.run_names() == {"m"}
    gone = after.advance(4, [], [MergeResult(None, range(0, 2), ("m",))])
    assert gone.run_names() == set()
    assert gone.counts() == [0, 0, 0, 0]


def test_one_run_may_replace_other_runs_in_each_group() -> None:
    manifest = EMPTY.advance(1, [run("a", [1, 1])]).advance(2, [run("b", [0, 1])])
    manifest = manifest.advance(3, [run("c", [1, 1])])
    new = run("m", [2, 2])
    parts = [MergeResult(new, range(0, 1), ("c", "a")), MergeResult(new, range(1, 2), ("c", "b"))]
    after = manifest.advance(4, [], parts)
    assert [names(after, 0), names(after, 1)] == [["m"], ["m", "a"]]


def test_merges_that_would_change_what_counts_are_refused() -> None:
    manifest = EMPTY
    for epoch, name in enumerate("abc", 1):
        manifest = manifest.advance(epoch, [run(name, [1, 1])])
    for inputs in [("c", "a"), ("c", "x")]:
        with pytest.raises(ValueError, match=r"group 0: .* do not follow each other in age"):
            manifest.advance(4, [], [MergeResult(run("m", [2]), range(0, 1), inputs)])
    new = run("m", [2, 1])
    parts = [MergeResult(new, range(0, 1), ("b", "a")), MergeResult(new, range(1, 2), ("d",))]
    with pytest.raises(ValueError, match="no age of m is right in all of its groups"):
        manifest.advance(4, [run("d", [0, 1])], parts)


def test_a_manifest_comes_back_from_disk(tmp_path: Path) -> None:
    merged = MergeResult(run("m", [2], 1), range(1, 2), ("b", "a"))
    manifest = EMPTY.advance(1, [run("a", [1, 1])]).advance(2, [run("b", [1, 1])])
    manifest = manifest.advance(
        3, [], [MergeResult.from_json(json.loads(json.dumps(merged.to_json())))]
    )
    crc = manifest.write(tmp_path, "3.json")
    assert Manifest.read(tmp_path / "3.json", crc) == manifest
    assert Manifest.read(tmp_path / "3.json") == manifest


def test_a_manifest_that_is_not_what_was_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "3.json"
    crc = EMPTY.write(tmp_path, "3.json")
    data = path.read_bytes()
    EMPTY.advance(1, [run("a", [1])]).write(tmp_path, "3.json")
    with pytest.raises(Damaged, match=r"3\.json is damaged or is of another epoch"):
        Manifest.read(path, crc)
    path.write_bytes(data.replace(b'"groups":4', b'"groups":5'))
    with pytest.raises(Damaged, match=r"3\.json is damaged") as damaged:
        Manifest.read(path)
    assert "restore a savepoint, or roll back" in damaged.value.hint
    path.unlink()
    with pytest.raises(Damaged, match=r"3\.json is missing"):
        Manifest.read(path, crc)
