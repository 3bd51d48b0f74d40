"""What the page shows of a home, while it changes and when files are damaged."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import reading
from alive import Alive
from saved import SPARK

from onceflow.errors import JobError
from onceflow.page import home_reader, rates
from onceflow.page.job_cache import HomeCache
from onceflow.page.query_cache import row_position
from onceflow.protocol.lease import host_name
from onceflow.snapshots.savepoints import Savepoints

pytestmark = pytest.mark.usefixtures("no_fsync")


def only(home: Path) -> dict[str, Any]:
    (found,) = reading.jobs(home)
    return found


def kinds(home: Path, job: str = "shop") -> list[str]:
    return [mark["kind"] for mark in reading.job(home, job)["marks"]]


# ---------------------------------------------------------------- a job's life


def test_a_job_that_runs(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(3)
    shop.tell()
    found = only(tmp_path)
    assert (found["job"], found["state"], found["term"], found["epoch"]) == (
        "shop",
        "running",
        1,
        2,
    )
    assert found["leader"]["pid"] == os.getpid()
    assert str(os.getpid()) in found["says"]
    assert (found["lag_s"], found["rows_in_per_s"]) == (0.7, 30.0)
    assert found["rows_out_per_s"] == 3.3  # three epochs of eleven rows in ten seconds
    assert found["guarantee"] == "exactly-once"
    assert "exactly once" in found["guarantee_says"]
    assert len(found["sparkline"]) == 60
    # Each bucket, of two seconds, is rounded to a tenth of a row a second, the outermost to none.
    filled = sum(value > 0 for value in found["sparkline"])
    assert sum(found["sparkline"]) * 2 == pytest.approx(33, abs=2 * 0.05 * (filled + 2))
    assert (found["error"], found["restarts"]) == (None, 0)
    json.dumps(found)


def test_a_job_from_its_first_moment_to_its_end(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    assert reading.jobs(tmp_path) == []  # it is there, but nothing has happened
    shop.journal.starting()
    assert only(tmp_path)["state"] == "starting"
    shop.start()
    assert only(tmp_path)["state"] == "running"
    shop.run()
    shop.journal.event("ended")
    shop.lease.release()
    assert (only(tmp_path)["state"], only(tmp_path)["says"]) == ("stopped", "not running")
    assert kinds(tmp_path)[-2:] == ["start", "stop"]


def test_a_kill_is_seen_when_it_starts_again_and_marked_when_it_was(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run()
    shop.tell()
    shop.lease.release()  # as the kernel does for the dead
    found = only(tmp_path)
    assert (found["state"], found["says"]) == ("stopped", "not running: its driver was killed")
    seen = json.loads((tmp_path / "shop" / "progress.json").read_text())["at"]
    shop.start()
    found = reading.job(tmp_path, "shop")
    assert [mark["kind"] for mark in found["marks"]] == ["start", "killed", "start"]
    assert found["marks"][1]["at"] == seen
    assert (found["restarts"], found["state"], found["error"]) == (1, "running", None)


def test_errors_and_restarts_are_shown_with_their_messages(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.lease.release()
    away = {"message": "no server answers", "kind": "TargetAway", "in_s": 60}
    shop.journal.event("restarting", **away)
    found = only(tmp_path)
    assert (found["state"], found["error"]) == ("restarting", "no server answers")
    assert "no server answers" in found["says"]
    shop.journal.event("restarting", message="the driver was ended by SIGKILL", kind="DriverDied")
    shop.journal.event("error", message="column x is gone", kind="JobError")
    found = reading.job(tmp_path, "shop")
    assert (found["state"], found["restarts"]) == ("stopped", 2)
    assert found["says"] == "ended by an error: column x is gone"
    assert [mark["kind"] for mark in found["marks"]] == ["start", "restart", "killed", "error"]


def test_progress_of_a_driver_that_is_gone_does_not_count(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run()
    shop.tell()
    path = tmp_path / "shop" / "progress.json"
    body = json.loads(path.read_text())
    path.write_text(json.dumps({**body, "at": "2020-01-01T00:00:00Z"}))
    assert only(tmp_path)["lag_s"] is None
    path.write_text(json.dumps({**body, "pid": 1}))
    assert only(tmp_path)["lag_s"] is None


def test_a_driver_that_does_not_report_is_shown_as_silent(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run()
    shop.tell()
    leads = f"process {os.getpid()} on {host_name()} leads it"
    assert only(tmp_path)["says"] == leads
    path = tmp_path / "shop" / "progress.json"
    body = {**json.loads(path.read_text()), "at": rates.iso(time.time() - 24 * 3600)}
    path.write_text(json.dumps(body))
    found = only(tmp_path)
    assert (found["state"], found["says"]) == ("running", f"{leads}, but has not reported for 24 h")
    path.write_text(json.dumps({**body, "pid": 1}))  # of a driver before: this one has just begun
    assert only(tmp_path)["says"] == leads


def test_weaker_guarantees_are_described(tmp_path: Path) -> None:
    outputs = {
        "clicks": {"guarantee": "at-least-once", "kind": "log", "path": "x"},
        "rejected": {"guarantee": "exactly-once", "kind": "files", "path": "y"},
    }
    Alive(tmp_path, outputs=outputs).start()
    found = only(tmp_path)
    assert found["guarantee"] == "at-least-once"
    assert "twice" in found["guarantee_says"]
    assert "out/clicks" in found["guarantee_says"]


# ---------------------------------------------------------------- one job


def test_the_queries_of_a_job_with_their_edges_and_epochs(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(5)
    shop.tell()
    Savepoints(shop.folder).create("before", {"who": "me"})
    found = reading.job(tmp_path, "shop")
    (query,) = found["queries"]
    assert (query["query"], query["epoch"], query["rows"]) == ("out", 4, 11)
    assert [s["place"] for s in query["sources"]] == [f"{tmp_path}/lines"]
    assert query["sources"][0]["rows_per_s"] == 30.0
    outputs = {output["output"]: output for output in query["outputs"]}
    assert (outputs["clicks"]["rows"], outputs["clicks"]["rows_total"]) == (10, 30)
    assert outputs["clicks"]["rows_per_s"] == 5.0
    assert (query["late_rows"], query["rejected_rows"]) == (4, 3)
    assert query["state_rows"] == 7
    assert query["state_bytes"] > 1000
    assert query["percentiles"]["epochs"] == 5
    assert query["percentiles"]["p50"] is not None
    assert [step["epoch"] for step in query["steps"]] == [0, 1, 2, 3, 4]
    assert query["steps"][0]["at"] < query["steps"][-1]["at"]
    assert list(query["steps"][0]["ms"]) == [
        "check", "stage", "harden", "decide", "publish", "sweep",
    ]  # fmt: skip
    assert query["steps"][0]["rows_in"] == 100
    assert [m["says"] for m in found["marks"] if m["kind"] == "savepoint"] == ["savepoint before"]
    json.dumps(found)


def test_a_new_savepoint_is_marked_once_it_is_complete(
    tmp_path: Path,
) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(5)
    home = HomeCache(tmp_path)

    def marked() -> list[str]:
        home.read()
        marks = home.job("shop").details(home.jobs)["marks"]
        return [mark["savepoint"] for mark in marks if mark["kind"] == "savepoint"]

    savepoints = Savepoints(shop.folder)
    savepoints.create("before", {"who": "me"})
    manifest = savepoints.manifest("before")
    begun = manifest.rename(manifest.with_name("not yet"))
    os.utime(manifest.parents[1], (0, 0))  # nothing was changed there just now
    assert marked() == []
    begun.rename(manifest)
    assert marked() == ["before"]
    savepoints.delete("before")
    assert marked() == []


def test_logs_of_lineages_are_read_incrementally_and_stay_small(
    tmp_path: Path,
) -> None:
    shop = Alive(tmp_path)
    shop.start()
    logs: home_reader.Logs = {}
    kept = set()
    for epoch in range(12):
        shop.run()
        if epoch == 7:
            assert shop.log.roll_up(keep=2, slack=0)
        (told,) = reading.lineages(tmp_path, "shop", logs)
        assert told["queries"] == {"out": {"first": 0, "last": epoch}}
        (log,) = logs.values()
        kept.add(id(log))
        assert [decision.epoch for decision in log.decisions] == [epoch]
    assert len(kept) == 1


def test_jobs_are_linked_by_what_they_write_and_read(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    reader = {"sources": {"lines": {"kind": "log", "place": f"{tmp_path}/clicks"}}, "outputs": {}}
    Alive(tmp_path, "load", **reader).start()
    (link,) = reading.job(tmp_path, "shop")["links"]
    assert (link["job"], link["reads"]) == ("load", True)
    (link,) = reading.job(tmp_path, "load")["links"]
    assert (link["job"], link["reads"], link["place"]) == ("shop", False, f"{tmp_path}/clicks")


def test_a_sink_of_another_package_is_linked_to_the_job_that_reads_its_target(
    tmp_path: Path,
) -> None:
    target = {"kind": "duckdb", "path": f"{tmp_path}/shop.duckdb", "table": "rows"}
    Alive(tmp_path, outputs={"rows": target}).start()
    reader = {"sources": {"rows": {"kind": "duckdb", "place": target["path"]}}, "outputs": {}}
    Alive(tmp_path, "load", **reader).start()
    shop = reading.job(tmp_path, "shop")
    (link,), (query,) = shop["links"], shop["queries"]
    assert (link["job"], link["reads"], link["place"]) == ("load", True, target["path"])
    (output,) = query["outputs"]
    assert output["place"] == link["place"]
    assert output["target"] == f"{target['path']}, table rows"


def test_offsets_that_count_rows_tell_the_rate_of_each_source() -> None:
    assert row_position({"log": "x", "path": "y", "next": [3, 4]}) == 7
    assert row_position({"orders": {"0": 5, "1": 6}, "clicks": {"0": 1}}) == 12
    assert row_position({"logOffset": 3}) is None
    assert row_position(None) is None


# ---------------------------------------------------------------- following


def test_cached_answers_equal_answers_that_are_read_anew(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    home = HomeCache(tmp_path)
    for turn in range(6):
        if turn == 0:
            shop.start()
        if turn == 3:
            shop.lease.release()
            shop.start()
        shop.run(40)  # so that entries are rolled up on the way
        shop.log.roll_up(keep=20, slack=20)
        shop.tell()
        home.read()
        now = time.time()
        followed = home.job("shop").details(home.jobs, now)
        fresh = HomeCache(tmp_path)
        fresh.read()
        anew = fresh.job("shop").details(fresh.jobs, now)
        assert followed["queries"][0]["steps"][-20:] == anew["queries"][0]["steps"][-20:]
        for part in ("state", "epoch", "term", "marks", "restarts"):
            assert followed[part] == anew[part]


def test_a_new_lineage_and_a_job_that_goes_are_noticed(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(3)
    home = HomeCache(tmp_path)
    home.read()
    assert home.job("shop").queries["out"].epochs[-1].epoch == 2
    child = "7e9f0a52-5f0b-4f7c-9d5b-0d6c1f0f8f11"
    shop.folder.put_lineage(child, {"parent": {}, "reason": "rollback", "at": "x", "spark": SPARK})
    query = shop.folder.query(child, "out")
    query.epoch_log().begin({"parent": {}, "cut": 1, "outputs": {}}, shop.log.decisions[:2])
    shop.log.end({"to": child, "at": "x"})
    home.read()
    home.read()
    assert home.job("shop").queries["out"].query.lineage == child
    assert home.job("shop").queries["out"].epochs[-1].epoch == 1
    (tmp_path / "shop").rename(tmp_path / "_gone")
    home.read()
    assert home.jobs == []


def test_unchanged_files_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(3)
    shop.tell()
    home = HomeCache(tmp_path)
    for path in tmp_path.rglob("*"):  # what changed just now is read once more
        os.utime(path, (1, 1))
    home.read()
    opened: list[str] = []
    for name in ("read_bytes", "read_text"):
        monkeypatch.setattr(Path, name, seen(opened, getattr(Path, name)))
    home.read()
    assert opened == []
    shop.run()
    opened.clear()
    home.read()
    entries = [path for path in opened if "/log/" in path]
    assert 1 <= len(entries) <= 3  # the new one, and that there is none after it


def seen(opened: list[str], real: Any) -> Any:
    def read(path: Path) -> Any:
        opened.append(str(path))
        return real(path)

    return read


# ---------------------------------------------------------------- what is broken


def test_a_damaged_log_is_shown_and_hides_no_other_job(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(2)
    Alive(tmp_path, "other").start()
    (entry, *_) = sorted((shop.query.folder / "onceflow" / "log").iterdir())
    entry.write_bytes(entry.read_bytes()[:50])
    found = {job["job"]: job for job in reading.jobs(tmp_path)}
    assert (found["shop"]["state"], found["other"]["state"]) == ("damaged", "running")
    assert str(entry) in found["shop"]["error"]
    assert reading.job(tmp_path, "shop")["state"] == "damaged"
    assert "error" in reading.state(tmp_path, "shop")[0]
    assert "damaged" in reading.ledgers(tmp_path, "shop")[0]["says"]


@pytest.mark.parametrize("name", ["progress.json", "events.jsonl", "times.jsonl"])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}\n", b"[1]\n7\nnull\n", b'{"a": 1}\n'])
def test_an_incomplete_file_is_ignored(tmp_path: Path, name: str, content: bytes) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(2)
    shop.tell()
    (path,) = (p for p in (tmp_path / "shop").rglob(name))
    path.write_bytes(content)
    assert only(tmp_path)["state"] == "running"
    assert reading.job(tmp_path, "shop")["queries"][0]["epoch"] == 1


def test_a_journal_of_another_shape_is_skipped(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    with open(tmp_path / "shop" / "events.jsonl", "a") as file:
        file.write('{"event": "restarting", "at": "2026-01-01T00:00:00Z", "in_s": "soon"}\n')
        file.write('{"event": "started", "at": 7, "queries": 3}\n{"event": null}\n')
        file.write('{"event": "started", "at": "2026-01-01T00:00:00Z", "queries": [1]}\n')
    assert only(tmp_path)["state"] == "running"


def test_names_are_checked_before_they_touch_a_path(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text("{}\n")
    for name in ("../secret", "..", "", "a/b", "_boards", "a\0b", "x" * 200):
        for read in (
            reading.job,
            reading.state,
            reading.ledgers,
            reading.lineages,
            reading.savepoints,
        ):
            with pytest.raises(JobError):
                read(tmp_path, name)
        with pytest.raises(JobError):
            reading.board(tmp_path, name)
        with pytest.raises(JobError):
            reading.verify_run(tmp_path, name)


# ---------------------------------------------------------------- ledgers


def test_a_target_that_hangs_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    shop = Alive(tmp_path)
    shop.start()
    shop.run()
    go = threading.Event()
    monkeypatch.setattr("onceflow.page.ledger_lookup.ledger_of", lambda *_: go.wait(60))
    found = reading.ledgers(tmp_path, "shop", deadline=0.05)
    assert [row["says"] for row in found] == ["no answer within 0.05 s"] * 2
    for _ in range(4):
        last = reading.ledgers(tmp_path, "shop", deadline=0.05)
    assert "not asked" in last[0]["says"]  # threads that hang are bounded
    go.set()


def test_ledgers_are_what_the_targets_say(tmp_path: Path) -> None:
    shop = Alive(tmp_path)
    shop.start()
    shop.run()
    found = {row["output"]: row for row in reading.ledgers(tmp_path, "shop")}
    assert found["clicks"]["decided"] == 0
    assert found["rejected"]["published"] is None


# ---------------------------------------------------------------- boards and runs


def test_a_board_is_thinned_and_survives_half_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "_boards"
    folder.mkdir()
    lines = [{"board": "ads", "title": "Ads", "unit": {"clicks": "clicks"}}]
    samples = [{"at": "2026-01-01T00:00:00Z", "t": n, "totals": {"clicks": n}} for n in range(2000)]
    lines += [{**sample, "campaigns": [{"campaign": "lunch"}]} for sample in samples]
    lines.insert(900, {"at": "2026-01-01T00:00:00Z", "t": 3, "mark": "kill", "what": "kill -9"})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "ads.jsonl").write_text(text + '{"at": "2026-01')
    (folder / "not a name.jsonl").write_text(text)
    (board,) = reading.boards(tmp_path)
    assert (board["board"], board["title"]) == ("ads", "Ads")
    found = reading.board(tmp_path, "ads")
    assert found["unit"] == {"clicks": "clicks"}
    assert len(found["samples"]) == 600
    assert found["last"] == lines[-1]
    assert found["samples"][-1] == samples[-1], "campaigns are large, and shown of the last only"
    assert [mark["mark"] for mark in found["marks"]] == ["kill"]


def test_runs_of_verify_running_ended_and_broken(tmp_path: Path) -> None:
    from onceflow.harness.run_record import RunRecord

    assert reading.verify_runs(tmp_path) == []
    record = RunRecord(tmp_path / "_verify", "onceflow verify --seed 7")
    record.take({"event": "begin", "at_s": 0.0, "seed": 7})
    record.take({"event": "progress", "faults": 1, "of": 2})
    record.take({"event": "progress", "faults": 2, "of": 2})
    (run,) = reading.verify_runs(tmp_path)
    assert (run["state"], run["command"]) == ("running", "onceflow verify --seed 7")
    assert run["progress"]["faults"] == 1
    old = tmp_path / "_verify" / "2020"
    old.mkdir()
    (old / "events.jsonl").write_text('{"event": "begin", "at": "2020-01-01T00:00:00Z"}\n')
    assert [r["state"] for r in reading.verify_runs(tmp_path)] == ["running", "broken"]
    assert [e["event"] for e in reading.verify_run(tmp_path, run["run"])["events"]] == ["begin"]


def test_a_run_that_ended_has_its_verdict_and_its_report(tmp_path: Path) -> None:
    from onceflow.harness.result import Result
    from onceflow.harness.run_record import RunRecord

    record = RunRecord(tmp_path / "_verify", "onceflow verify")
    result = Result(7, "onceflow verify", "local", "2026-01-01T00:00:00Z").as_json()
    record.take({"event": "verdict", "at_s": 1.0, **result})
    record.ended(result)
    (run,) = reading.verify_runs(tmp_path)
    assert (run["state"], run["verdict"], run["violations"]) == ("ended", "unknown", 0)
    assert run["report"]
    assert reading.verify_run(tmp_path, run["run"])["result"]["seed"] == 7


# ---------------------------------------------------------------- sums


def test_rows_of_an_epoch_are_spread_over_the_time_since_the_one_before() -> None:
    line = rates.sparkline([[(1000.0, 5), (1008.0, 80)]], now=1010.0)
    assert sum(line) * 2 == pytest.approx(85)
    assert line[-2] == line[-3] == 10.0
    assert line[-1] == 0.0


def test_epochs_of_the_same_moment_are_all_drawn() -> None:
    line = rates.sparkline([[(1007.0, 20), (1007.0, 20), (1007.0, 20)]], now=1010.0)
    assert sum(line) * 2 == pytest.approx(60)


def test_percentiles_are_by_the_nearest_rank() -> None:
    assert rates.percentiles(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99, "epochs": 100}
    assert rates.percentiles([]) == {"p50": None, "p90": None, "p99": None, "epochs": 0}
