"""Savepoints: whole or not there, wherever they are moved and whoever is killed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from saved import SPARK, Saved

from onceflow import faults
from onceflow.cli import main
from onceflow.cli.savepoint import command as savepoint_group
from onceflow.errors import CheckpointRefused, Damaged, DiskFull, JobError
from onceflow.protocol.holds import Holds
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lineage import Origin, OutputOrigin
from onceflow.protocol.retained_decisions import RetainedDecisions, sweep_all
from onceflow.snapshots import savepoint as savepoint_module
from onceflow.snapshots.epochs import restorable_decisions
from onceflow.snapshots.epochs import restorable_range as kept_epochs
from onceflow.snapshots.lineages import describe_lineages
from onceflow.snapshots.listings import list_savepoints
from onceflow.snapshots.savepoint import Savepoint
from onceflow.snapshots.savepoints import Savepoints
from onceflow.store.posix import VERSION, seal, unseal
from onceflow.testing.processes import child, run_and_kill

DOCS = Path(__file__).parents[2] / "docs"
POINTS = [p for p in faults.SNAPSHOTS if p.startswith("savepoint.")]
CREATE = [p for p in POINTS if p != "savepoint.unlisted"]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    made = Saved(tmp_path / "home")
    made.lead()
    made.decide(3)
    return made


@pytest.fixture
def savepoints(saved: Saved) -> Savepoints:
    return Savepoints(saved.folder)


def left(saved: Saved) -> set[str]:
    """All folders of savepoints, also of those that are not there."""
    root = saved.folder.folder / "savepoints"
    return {str(p.relative_to(root)) for p in root.glob("*/*") if p.is_dir()}


# ---------------------------------------------------------------- what it holds


def test_a_savepoint_is_of_the_last_decided_epoch_and_is_whole(
    saved: Saved, savepoints: Savepoints
) -> None:
    made = savepoints.create("before-lunch", {"who": "me"})
    made.verify()
    assert savepoints.names() == ["before-lunch"]
    assert made.body["queries"]["out"]["epoch"] == 2
    assert (made.body["code"], made.body["spark"], made.body["who"]) == ("c0de", SPARK, "me")
    ((lineage, cut),) = made.cuts().values()
    assert lineage == saved.query.lineage
    assert cut.decisions == saved.log.decisions[-2:]
    assert len(cut.sources["lines"]) == 3
    assert all(path.is_file() for path in cut.files.values())
    assert len([name for name in cut.files if name.endswith(".sst")]) == 2  # one is shared
    assert all(p.stat().st_nlink == 2 for p in cut.files.values())  # nothing was copied


def test_it_is_whole_when_the_job_goes_on_and_when_the_job_is_gone(
    saved: Saved, savepoints: Savepoints, tmp_path: Path
) -> None:
    made = savepoints.create("a", {})
    saved.decide(2)
    shutil.rmtree(saved.query.folder / "state")
    made.verify()
    shutil.move(made.folder, tmp_path / "elsewhere")
    shutil.rmtree(saved.folder.folder)
    moved = Savepoint.at(tmp_path / "elsewhere")
    moved.verify()
    assert moved.cuts().keys() == {"out"}


def test_a_second_savepoint_reads_only_what_changed(
    saved: Saved, savepoints: Savepoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onceflow.snapshots import cut as cuts

    read: list[str] = []
    real = cuts.sha256
    monkeypatch.setattr(cuts, "sha256", lambda p: read.append(p.name) or real(p))
    first = savepoints.create("a", {})
    everything = len(read)
    read.clear()
    saved.decide()
    second = savepoints.create("b", {})
    shared = {e["path"] for _, e in first.paths()} & {e["path"] for _, e in second.paths()}
    assert shared
    assert len(read) == everything - len(shared)
    second.verify()


def test_without_a_decided_epoch_there_is_nothing_to_save(tmp_path: Path) -> None:
    made = Saved(tmp_path / "home")
    made.lead()
    with pytest.raises(JobError, match="has not published an epoch yet"):
        Savepoints(made.folder).create("a", {})
    assert left(made) == set()


@pytest.mark.parametrize("name", ["../a", "a/b", ".hidden", "", " "])
def test_a_name_is_a_name(savepoints: Savepoints, name: str) -> None:
    if name:
        with pytest.raises(JobError, match="is not a name for a savepoint"):
            savepoints.create(name, {})
    else:
        assert savepoints.create(name, {}).name.startswith("20")  # the time


def test_a_name_is_taken_once(savepoints: Savepoints, saved: Saved) -> None:
    made = savepoints.create("a", {})
    with pytest.raises(JobError, match="savepoint 'a' exists already"):
        savepoints.create("a", {})
    made.verify()
    assert left(saved) == {f"a/{made.body['folder']}"}


def test_savepoints_are_listed_in_the_order_of_their_creation_whatever_clocks_say(
    saved: Saved, savepoints: Savepoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onceflow.snapshots import savepoints as module

    for at, name in enumerate("cab"):
        monkeypatch.setattr(module, "now", lambda at=at: f"202{9 - at}-01-01T00:00:00.000Z")
        savepoints.create(name, {})
    old = savepoints.read("a")  # made before savepoints had numbers
    body = {key: value for key, value in old.body.items() if key != "number"}
    (old.folder / "manifest.json").write_bytes(seal("savepoint", "a", body))
    assert [made["name"] for made in list_savepoints(saved.folder)["savepoints"]] == ["a", "c", "b"]
    (lineage,) = describe_lineages(saved.folder)
    assert [made["name"] for made in lineage["savepoints"]] == ["a", "c", "b"]


def test_a_lineage_names_the_process_that_opened_it(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path, "shop")
    folder.open_lineage(SPARK, "process 1 on here")
    made = Saved(tmp_path)
    made.lead(holder={"pid": 2, "host": "there"})
    folder.open_lineage(SPARK, "process 2 on there")
    assert [told["who"] for told in describe_lineages(folder)] == ["process 1 on here"]


def test_nothing_secret_is_in_a_savepoint(tmp_path: Path) -> None:
    from onceflow.sinks import Kafka, Postgres

    made = Saved(tmp_path / "home")
    sinks = {
        "pg": Postgres("postgresql://me:s3cret-word@db/shop", table="t"),
        "kafka": Kafka(
            "t", servers="b:9092", value="v",
            settings={"sasl.username": "me", "sasl.password": "s3cret-word"},
        ),
    }  # fmt: skip
    made.lead(outputs={name: sink.describe() for name, sink in sinks.items()})
    made.decide(2)
    folder = Savepoints(made.folder).create("a", {}).folder
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert files
    assert not [p for p in files if b"s3cret-word" in p.read_bytes()]
    assert b"shop" in (folder / "manifest.json").read_bytes()


# ---------------------------------------------------------------- killed, and two at once


def create(home: Path, name: str) -> None:
    Savepoints(JobFolder(home, "shop")).create(name, {})


def delete(home: Path, name: str) -> None:
    Savepoints(JobFolder(home, "shop")).delete(name)


@pytest.mark.kill
@pytest.mark.parametrize("point", [*CREATE, *faults.PUT])
def test_a_create_that_is_killed_leaves_a_whole_savepoint_or_none(
    saved: Saved, savepoints: Savepoints, point: str
) -> None:
    kept = savepoints.create("kept", {})
    run_and_kill(point, create, saved.folder.home, "a")
    listed = {"a"} & set(savepoints.names())
    assert listed == ({"a"} if point in ("savepoint.listed", "put.linked") else set())
    for name in savepoints.names():
        savepoints.read(name).verify()
    after = savepoints.create("b", {})  # sweeps
    folders = {f"{s.name}/{s.body['folder']}" for s in map(savepoints.read, savepoints.names())}
    assert left(saved) == folders
    assert not list(saved.folder.folder.glob("savepoints/*/.put-*"))
    if not listed:
        savepoints.create("a", {}).verify()
    kept.verify()
    after.verify()


@pytest.mark.kill
def test_a_delete_that_is_killed_has_deleted(saved: Saved, savepoints: Savepoints) -> None:
    savepoints.create("a", {})
    run_and_kill("savepoint.unlisted", delete, saved.folder.home, "a")
    assert savepoints.names() == []
    assert left(saved)
    savepoints.create("b", {})
    assert {name.partition("/")[0] for name in left(saved)} == {"b"}


@pytest.mark.parametrize("point", CREATE)
def test_a_create_that_fails_leaves_a_whole_savepoint_or_none(
    saved: Saved, savepoints: Savepoints, point: str
) -> None:
    faults.arm(point, "raise")
    with pytest.raises(faults.InjectedFault):
        savepoints.create("a", {})
    faults.disarm()
    assert len(left(saved)) == len(savepoints.names()) == (point == "savepoint.listed")
    for name in savepoints.names():
        savepoints.read(name).verify()


def paused_create(pipe: Any, home: Path, name: str, point: str) -> None:
    def wait(_: str) -> None:
        pipe.send("there")
        pipe.recv()

    faults.arm(point, wait)
    create(home, name)
    pipe.send("done")


def creating(saved: Saved, name: str, point: str) -> Any:
    return child(paused_create, saved.folder.home, name, point)


@pytest.mark.parametrize("point", ["savepoint.held", "savepoint.linked", "savepoint.copied"])
def test_nobody_sweeps_what_a_running_create_writes(
    saved: Saved, savepoints: Savepoints, point: str
) -> None:
    with creating(saved, "slow", point) as slow:
        assert slow.hear() == "there"
        saved.decide()
        savepoints.create("quick", {}).verify()
        savepoints.delete("quick")
        Holds(saved.folder).needed_after(saved.query)
        savepoints.create("quick", {})
        assert slow.ask() == "done"
    assert savepoints.names() == ["quick", "slow"]
    for name in savepoints.names():
        savepoints.read(name).verify()


def test_of_two_creates_of_one_name_one_wins(saved: Saved, savepoints: Savepoints) -> None:
    with creating(saved, "a", "savepoint.copied") as slow:
        assert slow.hear() == "there"
        won = savepoints.create("a", {})
        with pytest.raises(JobError, match="savepoint 'a' exists already"):
            slow.ask()
    won.verify()
    assert left(saved) == {f"a/{won.body['folder']}"}


def test_a_delete_leaves_a_create_of_the_same_name_alone(
    saved: Saved, savepoints: Savepoints
) -> None:
    with creating(saved, "a", "savepoint.copied") as slow:
        assert slow.hear() == "there"
        savepoints.create("a", {})
        savepoints.delete("a")
        assert slow.ask() == "done"
    savepoints.read("a").verify()


def test_what_is_removed_before_it_is_linked_is_taken_anew(
    saved: Saved, savepoints: Savepoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Spark's maintenance, while the job goes on."""
    real, tries = os.link, []

    def link(source: Path, target: Path) -> None:
        if str(source).endswith(".sst") and len(tries) < 3:
            tries.append(source)
            Path(source).unlink()
            saved.shared = ""
            saved.decide()
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    made = savepoints.create("a", {})
    made.verify()
    assert made.body["queries"]["out"]["epoch"] == 2 + len(tries) == 5


def test_what_is_always_removed_is_given_up_with_a_reason(
    saved: Saved, savepoints: Savepoints
) -> None:
    shutil.rmtree(saved.query.folder / "state" / "0" / "0" / "SSTs")
    with pytest.raises(CheckpointRefused, match=r"\.sst, part of 3_.*\.zip, is missing"):
        savepoints.create("a", {})
    assert left(saved) == set()


def test_a_snapshot_that_was_replaced_while_it_was_linked_is_noticed(
    saved: Saved, savepoints: Savepoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `.zip` that names other files than the one that was looked at."""
    real, done = os.link, []

    def link(source: Path, target: Path) -> None:
        if str(source).endswith(".zip") and not done:
            done.append(source)
            other = Path(source).with_suffix(".tmp")
            saved.shared = ""
            saved.decision(9)  # files that no decision names
            (newest,) = saved.query.folder.rglob("10_*.zip")
            newest.rename(other)
            other.replace(source)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    made = savepoints.create("a", {})
    assert done
    made.verify()


# ---------------------------------------------------------------- disk


def test_what_must_be_copied_must_fit(
    saved: Saved, savepoints: Savepoints, disk_of: Callable[[str, str], Path]
) -> None:
    """The savepoints on a disk of their own."""
    (saved.folder.folder / "savepoints").symlink_to(disk_of("other", "256k"))
    small = savepoints.create("small", {})
    small.verify()
    assert all(path.stat().st_nlink == 1 for path, _ in small.paths())
    big = saved.query.folder / "state" / "0" / "0" / "SSTs" / f"{saved.shared}.sst"
    big.write_bytes(b"x" * 1_000_000)
    with pytest.raises(
        DiskFull, match=r"1,00\d,\d\d\d bytes must be copied to .* has \d+,\d+ left"
    ):
        savepoints.create("big", {})
    assert savepoints.names() == ["small"]
    assert left(saved) == set() or all(name.startswith("small/") for name in left(saved))


# ---------------------------------------------------------------- damaged and foreign


def rewrite(made: Savepoint, **changes: Any) -> None:
    """The manifest of somebody else, sealed as it should be."""
    body = {**made.body, **changes}
    (made.folder / "manifest.json").write_bytes(seal("savepoint", made.name, body))


@pytest.mark.parametrize("how", ["flipped", "short", "gone"])
def test_every_damaged_file_is_found(savepoints: Savepoints, how: str) -> None:
    made = savepoints.create("a", {})
    for path, _ in made.paths():
        data = path.read_bytes()
        path.unlink()  # the job has the same file
        if how != "gone":
            path.write_bytes(data[:-1] if how == "short" else data[:-1] + bytes([data[-1] ^ 1]))
        with pytest.raises(Damaged, match="is missing" if how == "gone" else "has changed since"):
            made.verify()
        path.write_bytes(data)
    made.verify()


@pytest.mark.parametrize("at", range(0, 4000, 97))
def test_a_damaged_manifest_is_refused_and_hides_no_other(savepoints: Savepoints, at: int) -> None:
    made, other = savepoints.create("a", {}), savepoints.create("b", {})
    path = made.folder / "manifest.json"
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 4
    path.write_bytes(data)
    with pytest.raises(Damaged):
        savepoints.read("a")
    found = dict(savepoints.all())
    assert isinstance(found["a"], Damaged)
    assert isinstance(found["b"], Savepoint)
    savepoints.create("c", {}).verify()
    other.verify()
    assert [p for p in made.folder.iterdir() if p.is_dir()]  # nobody swept what cannot be read
    savepoints.delete("a")
    assert savepoints.names() == ["b", "c"]
    savepoints.create("a", {}).verify()


def test_a_savepoint_that_lacks_a_file_of_its_state_is_refused(savepoints: Savepoints) -> None:
    made = savepoints.create("a", {})
    held = made.body["queries"]["out"]
    for entry in held["files"]:
        files = [e for e in held["files"] if e is not entry]
        rewrite(made, queries={"out": {**held, "files": files}})
        with pytest.raises(CheckpointRefused, match="is not named in the manifest"):
            Savepoint.at(made.folder).verify()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decisions": []}, "cannot be read"),
        ({"decisions": [{"type": "epoch"}]}, "cannot be read: KeyError"),
        ({"epoch": 7}, "cannot be read: ValueError: 2"),
        ({"sources": {}}, "the log of source lines .* is not whole up to 2"),
        ({"sources": {"lines": ["no json"]}}, "cannot be read"),
    ],
)
def test_a_savepoint_from_which_no_job_could_start_is_refused(
    savepoints: Savepoints, changes: dict[str, Any], says: str
) -> None:
    made = savepoints.create("a", {})
    rewrite(made, queries={"out": {**made.body["queries"]["out"], **changes}})
    with pytest.raises(CheckpointRefused, match=says):
        Savepoint.at(made.folder).verify()


def test_a_savepoint_of_a_newer_onceflow_is_refused(savepoints: Savepoints) -> None:
    made = savepoints.create("a", {})
    rewrite(made, format=2, onceflow="3.1")
    with pytest.raises(Damaged, match=r"format 2, by onceflow 3.1; this onceflow knows format 1"):
        savepoints.read("a")
    path = made.folder / "manifest.json"
    head = json.loads(path.read_bytes().partition(b"\n")[0])
    path.write_bytes(json.dumps({**head, "version": VERSION + 1}).encode() + b"\n{}\n")
    with pytest.raises(Damaged, match=f"written by a newer onceflow .*knows {VERSION}"):
        savepoints.read("a")


@pytest.mark.parametrize(
    ("made_by", "here", "says"),
    [
        ("4.2.9", "4.2.1", None),
        ("4.3.0", "4.2.1", r"made by Spark 4.3.0, and this is Spark 4.2.1: .* minor version"),
        ("4.2.1", "4.3.0", r"made by Spark 4.2.1, and this is Spark 4.3.0"),
        ("3.5.4", "4.2.1", r"made by Spark 3.5.4; this onceflow knows 4.2, 4.3"),
        ("5.0.0", None, r"made by Spark 5.0.0; this onceflow knows 4.2, 4.3"),
        ("4.2.1", None, None),  # no Spark here: it is looked at where there is one
    ],
)
def test_a_savepoint_of_another_minor_version_of_spark_is_refused(
    savepoints: Savepoints,
    monkeypatch: pytest.MonkeyPatch,
    made_by: str,
    here: str | None,
    says: str | None,
) -> None:
    made = savepoints.create("a", {})
    rewrite(made, spark=made_by)
    monkeypatch.setattr(savepoint_module, "installed_spark", lambda: here)
    if says is None:
        return Savepoint.at(made.folder).verify()
    with pytest.raises(CheckpointRefused, match=says):
        Savepoint.at(made.folder).verify()
    return None


# ---------------------------------------------------------------- deleting


def restored(saved: Saved, made: Savepoint, *, ended: bool = True, to_replay: int = 0) -> Saved:
    """As a restore leaves it, killed before its commit point or not."""
    child = Saved.__new__(Saved)
    child.folder, child.shared = saved.folder, ""
    name = "11111111-2222-3333-4444-555555555555"
    child.query = saved.folder.query(name, "out")
    child.log = child.query.epoch_log()
    last = saved.log.last
    assert last is not None
    ((of, cut),) = made.cuts().values()
    choice, ended_in = "skip" if to_replay else "rewind", saved.query.lineage
    stood = OutputOrigin(choice, of, ended_in, last.epoch, last.nonce)
    origin = Origin(
        name, of, cut.decision.epoch, cut.decision.nonce, ended_in, {"out": stood}
    )  # fmt: skip
    for decision in saved.log.decisions[-to_replay:] if to_replay else []:
        child.query.keep_for_replay(decision)
    child.log.begin({"at": "now", "origin": origin.as_json()}, cut.decisions)
    saved.folder.put_lineage(name, {"savepoint": made.identity, "reason": "restore"})
    if ended:
        saved.log.end({"at": "now", "to": name})
        child.log.read()
        child.lead(2)
    return child


def refused(savepoints: Savepoints) -> None:
    with pytest.raises(JobError, match=r"lineage 11111111 .* has published nothing yet"):
        savepoints.delete("a")
    savepoints.read("a").verify()


def test_a_savepoint_is_kept_until_the_restored_lineage_has_published(
    saved: Saved, savepoints: Savepoints
) -> None:
    made, other = savepoints.create("a", {}), savepoints.create("b", {})
    saved.decide(2)
    child = restored(saved, made)
    refused(savepoints)
    savepoints.delete(other.name)
    child.decide(term=2)
    savepoints.delete("a")
    assert savepoints.names() == []


def test_a_savepoint_is_kept_until_the_epochs_after_it_have_been_run_again(
    saved: Saved, savepoints: Savepoints
) -> None:
    made = savepoints.create("a", {})
    saved.decide(2)
    child = restored(saved, made, to_replay=2)
    refused(savepoints)
    child.decide(term=2)
    refused(savepoints)
    child.decide(term=2)
    savepoints.delete("a")


def test_a_savepoint_is_kept_for_a_restore_that_was_killed_until_the_job_goes_on_without(
    saved: Saved, savepoints: Savepoints
) -> None:
    made = savepoints.create("a", {})
    saved.decide()
    restored(saved, made, ended=False)
    refused(savepoints)
    saved.decide()
    savepoints.delete("a")


# ---------------------------------------------------------------- decisions that are kept


def roll_up(saved: Saved, keep: int = 2) -> None:
    past = RetainedDecisions(saved.query)
    if saved.log.roll_up(keep=keep, slack=0, before=past.keep):
        past.sweep()


def kept(saved: Saved) -> list[int]:
    return sorted({decision.epoch for decision in RetainedDecisions(saved.query).after(-1)})


def test_without_a_savepoint_nothing_of_the_past_is_kept(saved: Saved) -> None:
    saved.decide(10)
    roll_up(saved)
    assert kept(saved) == []
    assert not (saved.query.folder / "onceflow" / "past").exists()


def test_decisions_after_the_oldest_savepoint_are_kept_until_it_goes(
    saved: Saved, savepoints: Savepoints
) -> None:
    savepoints.create("a", {})  # of epoch 2
    all_of_them = []
    for _ in range(5):
        saved.decide(4)
        all_of_them += [d for d in saved.log.decisions if d not in all_of_them]
        roll_up(saved)
    oldest = saved.log.decisions[0].epoch
    assert RetainedDecisions(saved.query).after(2) == [
        d for d in all_of_them if 2 < d.epoch < oldest
    ]
    assert kept(saved) == list(range(3, oldest))
    assert len(list((saved.query.folder / "onceflow" / "past").iterdir())) < 6
    first = RetainedDecisions(saved.query).oldest()
    assert first is not None
    assert first.epoch == 3
    savepoints.create("b", {})
    savepoints.delete("a")
    sweep_all(saved.folder)
    assert kept(saved) == []  # b is younger than all of them
    saved.decide(10)
    roll_up(saved)
    newest = saved.log.decisions[0].epoch
    assert kept(saved) == list(
        range(savepoints.read("b").body["queries"]["out"]["epoch"] + 1, newest)
    )


def test_a_savepoint_of_a_lineage_before_needs_all_of_this_one(
    saved: Saved, savepoints: Savepoints
) -> None:
    made = savepoints.create("a", {})
    child = restored(saved, made)
    child.decide(10, term=2)
    roll_up(child)
    assert set(range(3, child.log.decisions[0].epoch)) <= set(kept(child))
    savepoints.delete("a")
    sweep_all(saved.folder)
    assert kept(child) == []


def rolled_up(home: Path) -> None:
    saved = Saved(home)
    saved.log.read()
    saved.lead(2)
    saved.decide(term=2)
    roll_up(saved)


@pytest.mark.kill
@pytest.mark.parametrize("point", ["past.kept", "rollup.written", "rollup.pruned-one"])
def test_killed_between_keeping_and_freeing_no_decision_is_lost(
    saved: Saved, savepoints: Savepoints, point: str
) -> None:
    savepoints.create("a", {})
    saved.decide(10)
    run_and_kill(point, rolled_up, saved.folder.home)
    again = Saved(saved.folder.home)
    for _ in range(2):
        have = {d.epoch for d in again.log.read().decisions} | set(kept(again))
        assert set(range(3, 14)) <= have
        again.log.prune()
        again.lead(3 + _)
        again.decide(3, term=3 + _)
        roll_up(again)


def test_what_a_create_holds_is_kept_while_it_works(saved: Saved, savepoints: Savepoints) -> None:
    with creating(saved, "slow", "savepoint.held") as slow:
        assert slow.hear() == "there"
        for _ in range(3):
            saved.decide(5)
            roll_up(saved)
        assert kept(saved) == list(range(3, saved.log.decisions[0].epoch))
        assert slow.ask() == "done"
    savepoints.read("slow").verify()


@pytest.mark.kill
def test_what_a_killed_create_held_is_freed_by_the_job(saved: Saved) -> None:
    run_and_kill("savepoint.held", create, saved.folder.home, "a")
    assert left(saved)
    saved.decide(10)
    roll_up(saved)
    assert kept(saved) == []
    assert left(saved) == set()


def test_a_job_that_is_quick_is_held_where_it_is(
    saved: Saved, savepoints: Savepoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the hold is put, the job goes on and frees what it was for."""
    from onceflow.protocol import holds as module

    real, put = module.replace_file, []

    def slow(path: Path, data: bytes) -> None:
        if len(put) < 2:
            saved.decide(8)
            roll_up(saved)
        put.append(unseal(data, "savepoint hold", None, "")["queries"]["out"][1])
        real(path, data)

    monkeypatch.setattr(module, "replace_file", slow)
    savepoints.create("a", {})
    assert put == [2, 10, 18]
    saved.decide(10)
    roll_up(saved)
    assert kept(saved) == list(range(19, saved.log.decisions[0].epoch))


def test_creates_and_a_job_that_goes_on_at_once(saved: Saved, no_fsync: None) -> None:
    """All that is listed is whole and has all decisions after its cut."""
    stop, failures = threading.Event(), []

    def make(worker: int) -> None:
        number = 0
        try:
            while not stop.is_set():
                Savepoints(saved.folder).create(f"{worker}-{number}", {})
                number += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=make, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        saved.decide(4)
        roll_up(saved)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    savepoints = Savepoints(saved.folder)
    assert len(savepoints.names()) > 3
    oldest = 10**9
    for name in savepoints.names():
        made = savepoints.read(name)
        made.verify()
        oldest = min(oldest, made.body["queries"]["out"]["epoch"])
    have = {d.epoch for d in saved.log.decisions} | set(kept(saved))
    last = saved.log.last
    assert last is not None
    assert set(range(oldest + 1, last.epoch + 1)) <= have


# ---------------------------------------------------------------- retained epochs


@pytest.mark.parametrize("keep", [2, 3, 5, 100])
def test_a_glance_at_the_retained_epochs_says_what_reading_all_of_them_does(
    tmp_path: Path, keep: int, no_fsync: None
) -> None:
    made = Saved(tmp_path / "home")
    assert kept_epochs(made.query) is None
    made.lead()
    assert kept_epochs(made.query) is None
    for number in range(1, 13):
        made.lead(number + 1)
        made.decide(number % 4, term=number + 1)
        made.log.roll_up(keep=keep, slack=number % 3)
        for gone in (made.query.folder / "offsets").glob("*"):
            if number > 6 and int(gone.name) < number:  # Spark keeps the newest only
                gone.unlink()
        read = restorable_decisions(made.query)
        seen = kept_epochs(made.query)
        assert (seen is not None) == bool(read)
        if seen is not None:
            assert (seen.count, seen.first, seen.last) == (len(read), read[0], read[-1])
        assert made.query.epoch_log().read_end() is None
    made.log.end({"to": "another"})
    ended = made.query.epoch_log().read_end()
    assert ended is not None
    assert ended == made.query.epoch_log().read().ended
    assert kept_epochs(made.query) is not None


def test_a_glance_at_a_lineage_that_goes_on_from_a_cut(
    saved: Saved, savepoints: Savepoints
) -> None:
    child = restored(saved, savepoints.create("a", {}))
    assert kept_epochs(child.query) is None  # Spark has not begun
    child.decide(2, term=2)
    seen, read = kept_epochs(child.query), restorable_decisions(child.query)
    assert seen is not None
    assert (seen.count, seen.first, seen.last) == (len(read), read[0], read[-1])


# ---------------------------------------------------------------- the command


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`onceflow savepoint …` in this process."""
    monkeypatch.setenv("NO_COLOR", "1")

    def onceflow(*arguments: object) -> tuple[int, str, str]:
        words = ["onceflow", "savepoint", *map(str, arguments), "--home", str(saved.folder.home)]
        monkeypatch.setattr(sys, "argv", words)
        with CliRunner().isolation() as (out, err, *_):
            code = 0
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            return code, out.getvalue().decode(), err.getvalue().decode()

    return onceflow


def test_the_life_of_a_savepoint(run: Run, saved: Saved, tmp_path: Path) -> None:
    code, out, _ = run("create", "shop", "--name", "monday")
    assert code == 0
    assert "monday" in out
    assert "out 2" in out
    code, out, _ = run("list", "shop")
    assert "monday" in out
    assert "out: 3 epochs retained, 0 of " in out
    code, out, _ = run("list", "shop", "--epochs", "--json")
    found = json.loads(out)
    assert [s["name"] for s in found["savepoints"]] == ["monday"]
    assert [e["epoch"] for e in found["retained"][0]["epochs"]] == [0, 1, 2]
    code, out, _ = run("show", "shop", "monday")
    assert "savepoint monday of job shop" in out
    assert "c0de" in out
    assert 'source lines up to {"logOffset": 2}' in out
    shutil.copytree(saved.folder.folder / "savepoints" / "monday", tmp_path / "moved")
    for which in ("monday", tmp_path / "moved"):
        code, out, _ = run("verify", "shop", which)
        assert (code, "a job can start from it" in out) == (0, True)
    code, out, _ = run("delete", "shop", "monday")
    assert (code, out) == (0, "savepoint monday is deleted\n")
    code, out, _ = run("list", "shop")
    assert "job shop has no savepoint" in out


def test_what_is_wrong_is_said(run: Run, saved: Saved, savepoints: Savepoints) -> None:
    code, _, err = run("show", "shop", "monday")
    assert (code, "it has none yet: onceflow savepoint create shop" in err) == (2, True)
    for name in ("monday", "tuesday", "before-lunch"):
        savepoints.create(name, {})
    code, _, err = run("verify", "shop", "mondy")
    assert code == 2
    assert "job shop has no savepoint 'mondy'" in err
    assert "did you mean monday?" in err
    code, _, err = run("delete", "shop", "xxx")
    assert "there are: before-lunch, monday, tuesday" in err
    code, _, err = run("list", "shopp")
    assert (code, "there are: shop" in err) == (2, True)
    for path, _ in savepoints.read("monday").paths():
        path.unlink()
    code, _, err = run("verify", "shop", "monday")
    assert (code, "is missing" in err) == (7, True)
    (saved.folder.folder / "savepoints" / "monday" / "manifest.json").write_bytes(b"{}")
    code, out, _ = run("list", "shop")
    assert (code, "savepoint monday cannot be read: " in out) == (0, True)
    assert "tuesday" in out


def test_operations_shows_every_command() -> None:
    for name in savepoint_group.commands:
        assert f"$ onceflow savepoint {name} orders" in (DOCS / "operations.md").read_text()
