"""The demo without Spark: its stream, its truth, its judgement, and how it ends processes."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from onceflow.cli.demo import command, next_commands
from onceflow.cli.demo_screen import WORDS
from onceflow.cli.telling import Json, Plain, Terminal
from onceflow.demo import play as stage
from onceflow.demo.feed import Feed
from onceflow.demo.processes import Run, frozen
from onceflow.demo.stream import BEGIN, COMMITS, DELAY, LATEST, SPAN, Stream, Truth, table
from onceflow.demo.verdict import Result as Found
from onceflow.demo.verdict import judge, read
from onceflow.errors import JobError, LeaseHeld
from onceflow.log.embedded import EmbeddedLog
from onceflow.runtime.lease import Lease

SHIPPED = resources.files("onceflow.demo").joinpath("ads.py").read_text()


@pytest.fixture(scope="module")
def stream() -> Stream:
    return Stream(seed=5, events=4000)


# ---------------------------------------------------------------- the stream


def test_a_seed_gives_the_same_stream_and_the_same_truth_again(stream: Stream) -> None:
    again, other = Stream(seed=5, events=4000), Stream(seed=6, events=4000)
    assert again.rows == stream.rows
    assert again.truth() == stream.truth()
    assert other.rows != stream.rows
    assert other.truth() != stream.truth()


@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_later_than_the_watermark_allows_wherever_an_epoch_begins(seed: int) -> None:
    """Its lateness behind the newest row before it bounds what any cut into epochs can see."""
    newest, latest = datetime.min.replace(tzinfo=BEGIN.tzinfo), timedelta(0)
    for row in Stream(seed=seed, events=2000).rows:
        newest = max(newest, row.event_time)
        latest = max(latest, newest - row.event_time)
    assert timedelta(seconds=5) < latest <= LATEST < DELAY


def test_the_job_waits_as_long_as_the_stream_says() -> None:
    (delay,) = re.findall(r'withWatermark\("event_time", "(\d+) seconds"\)', SHIPPED)
    assert timedelta(seconds=int(delay)) == DELAY


def test_events_arrive_again_in_later_commits_with_the_same_id_and_time(stream: Stream) -> None:
    first: dict[str, tuple[int, Any]] = {}
    apart = []
    for number, commit in enumerate(stream.commits()):
        for row in commit:
            if row.event is None:
                continue
            seen, before = first.setdefault(row.event.id, (number, row))
            assert row == before
            apart.append(number - seen)
    again = len(apart) - len(first)
    assert len(first) == stream.events
    assert again == stream.again > stream.events * 0.03
    assert sum(distance > 0 for distance in apart) > again / 2


def test_what_is_malformed_cannot_be_parsed_and_all_else_can(stream: Stream) -> None:
    def parses(text: str) -> bool:
        try:
            found = json.loads(text)
        except ValueError:
            return False
        names = ("id", "ad", "kind")
        return isinstance(found, dict) and all(found.get(name) is not None for name in names)

    for row in stream.rows:
        assert parses(row.value) == (row.event is not None), row.value
    assert stream.malformed == stream.truth().rejected.total() > stream.events * 0.005


def test_the_truth_counts_every_event_once(stream: Stream) -> None:
    truth = stream.truth()
    assert truth.counts.total() == stream.events
    cells = Counter()
    seen = set()
    for row in stream.rows:
        if row.event is not None and row.event.id not in seen:
            seen.add(row.event.id)
            fields = json.loads(row.value)
            minute = row.event_time.isoformat(sep=" ")[:16]
            cells[fields["ad"], fields["kind"], minute] += 1
    assert cells == truth.counts
    assert {kind for _, kind, _ in cells} == {"impression", "click"}
    assert len({minute for *_, minute in cells}) == SPAN / timedelta(minutes=1)


def test_commits_are_the_rows_in_order_and_the_closing_event_is_far_ahead(stream: Stream) -> None:
    commits = stream.commits()
    assert len(commits) == COMMITS
    assert all(commits)
    assert [row for commit in commits for row in commit] == stream.rows
    last_window_ends = max(row.event_time for row in stream.rows) + timedelta(minutes=1)
    assert stream.closing.event_time - DELAY > last_window_ends
    assert stream.closing.event not in [row.event for row in stream.rows]


# ---------------------------------------------------------------- feeding the log


@pytest.mark.parametrize("kills", [1, 10])
@pytest.mark.parametrize("hunger", [1, 10_000])
def test_a_job_that_is_to_be_killed_always_has_rows_ahead(
    kills: int, hunger: int, tmp_path: Path
) -> None:
    """However much it reads at a time: when half of its part is read, more is still to come."""
    stream, time_ = Stream(seed=1, events=1000), iter(range(1_000_000))
    log = EmbeddedLog.create(tmp_path / "events")
    feed = Feed(stream, log, lives=kills + 1, clock=lambda: float(next(time_)))
    read = 0
    for life in range(kills):
        for _ in range(COMMITS):
            feed.append_while_down(life)
        while read < feed.half_of_part(life):
            feed.append(read=read)
            read = min(feed.appended, read + hunger)
        read = before = feed.appended  # it has caught up, and was not caught in an epoch
        feed.append(read=read)
        assert feed.appended > before
        assert not feed.done
    while not feed.done:
        feed.append_the_rest()
    assert feed.appended == feed.rows == sum(log.refresh().view.next)
    assert feed.close() == feed.rows + 1 == sum(log.refresh().view.next)


# ---------------------------------------------------------------- judging


def publish(folder: Path, truth: Truth) -> None:
    """What a perfect job leaves, in two files for each output and a table."""
    rows = [
        {"minute": datetime.fromisoformat(f"{minute}:00+00:00"), "ad": ad, "kind": kind, "count": n}
        for (ad, kind, minute), n in sorted(truth.counts.items())
    ]
    lines = [{"value": line} for line in truth.rejected.elements()]
    for name, content in (("counts", rows), ("rejected", lines)):
        (folder / "out" / name / "_commits").mkdir(parents=True)
        (folder / "out" / name / "_commits" / "1.json").write_text("{}")
        half = len(content) // 2
        pq.write_table(pa.Table.from_pylist(content[:half]), folder / "out" / name / "1.parquet")
        pq.write_table(pa.Table.from_pylist(content[half:]), folder / "out" / name / "2.parquet")
    with closing(sqlite3.connect(folder / "out" / "counts.db")) as db:
        db.execute("CREATE TABLE counts (minute TEXT, ad TEXT, kind TEXT, count INTEGER)")
        db.executemany(
            "INSERT INTO counts VALUES (:minute, :ad, :kind, :count)",
            [{**row, "minute": row["minute"].strftime("%Y-%m-%d %H:%M:%S.000000")} for row in rows],
        )
        db.commit()


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "out" / "counts.db")) as db:
        assert db.execute(statement).rowcount == 1
        db.commit()


def test_a_perfect_result_is_exact(stream: Stream, tmp_path: Path) -> None:
    publish(tmp_path, stream.truth())
    verdict = judge(stream.truth(), read(tmp_path))
    assert verdict.exact
    assert (verdict.lost, verdict.duplicated) == (0, 0)
    assert verdict.compared == 2 * len(stream.truth().counts) + len(stream.truth().rejected)


def test_a_row_that_is_missing_there_twice_or_changed_is_named(
    stream: Stream, tmp_path: Path
) -> None:
    publish(tmp_path, stream.truth())
    cell = ("ad-01", "impression", "2026-01-01 12:01")
    here = "ad = 'ad-01' AND kind = 'impression' AND minute LIKE '2026-01-01 12:01%'"
    count = stream.truth().counts[cell]
    says = "sqlite: ad-01 impression 2026-01-01 12:01:"

    change(tmp_path, f"UPDATE counts SET count = count + 2 WHERE {here}")
    verdict = judge(stream.truth(), read(tmp_path))
    assert (verdict.exact, verdict.lost, verdict.duplicated) == (False, 0, 2)
    assert [str(d) for d in verdict.differences] == [f"{says} {count + 2} instead of {count}"]

    change(tmp_path, f"UPDATE counts SET count = {count} WHERE {here}")
    change(tmp_path, f"INSERT INTO counts SELECT * FROM counts WHERE {here}")
    verdict = judge(stream.truth(), read(tmp_path))
    assert (verdict.exact, verdict.lost, verdict.duplicated) == (False, 0, count)
    assert [str(d) for d in verdict.differences] == [
        f"{says} {count} and {count} instead of {count}"
    ]

    change(
        tmp_path, f"DELETE FROM counts WHERE rowid = (SELECT max(rowid) FROM counts WHERE {here})"
    )
    change(tmp_path, f"DELETE FROM counts WHERE {here}")
    verdict = judge(stream.truth(), read(tmp_path))
    assert (verdict.exact, verdict.lost, verdict.duplicated) == (False, count, 0)
    assert [str(d) for d in verdict.differences] == [f"{says} nothing instead of {count}"]


def test_parts_that_add_up_and_rows_that_nobody_sent_are_not_exact(stream: Stream) -> None:
    truth = stream.truth()
    good = {cell: [count] for cell, count in truth.counts.items()}
    perfect = Found(good, good, truth.rejected)
    assert judge(truth, perfect).exact
    cell = max(good)
    torn = judge(truth, replace(perfect, files={**good, cell: [1, truth.counts[cell] - 1]}))
    assert (torn.exact, torn.lost, torn.duplicated) == (False, 0, 0)
    strange = judge(truth, replace(perfect, files={**good, ("ad-99", "click", "never"): [3]}))
    assert (strange.exact, strange.lost, strange.duplicated) == (False, 0, 3)
    line, times = truth.rejected.most_common(1)[0]
    missing = judge(truth, replace(perfect, rejected=truth.rejected - Counter([line])))
    assert (missing.exact, missing.lost, missing.duplicated) == (False, 1, 0)
    assert str(missing.differences[0]).endswith(f"{times - 1 or 'nothing'} instead of {times}")


def test_targets_that_are_not_there_have_lost_everything(stream: Stream, tmp_path: Path) -> None:
    verdict = judge(stream.truth(), read(tmp_path))
    assert not verdict.exact
    assert verdict.lost == 2 * stream.events + stream.malformed


# ---------------------------------------------------------------- the command


def demo(folder: Path, monkeypatch: pytest.MonkeyPatch, tamper: str = "", *more: str) -> Result:
    """The command with a job that publishes the truth, which is then tampered with."""

    def live(self: stage.Play, life: int) -> None:
        publish(self.folder, self._stream.truth())
        if tamper:
            change(self.folder, tamper)

    monkeypatch.setattr(stage.Play, "_live", live)
    arguments = ["--folder", str(folder), "--events", "1000", "--seed", "5", "--kills", "0", *more]
    return CliRunner().invoke(command, arguments)


def test_a_result_that_is_exact_is_exit_code_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = demo(tmp_path / "demo", monkeypatch)
    assert done.exit_code == 0, done.output
    assert "lost 0, duplicated 0" in done.output
    assert "try next:" in done.output


def test_a_result_that_was_tampered_with_is_exit_code_1_and_says_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper = "DELETE FROM counts WHERE rowid = 7"
    ad, kind, minute = sorted(Stream(seed=5, events=1000).truth().counts)[6]
    count = Stream(seed=5, events=1000).truth().counts[ad, kind, minute]
    done = demo(tmp_path / "demo", monkeypatch, tamper)
    assert done.exit_code == 1
    assert f"lost {count}, duplicated 0: 1 of " in done.output
    assert f"sqlite: {ad} {kind} {minute}: nothing instead of {count}\n" in done.output

    done = demo(tmp_path / "demo", monkeypatch, tamper, "--json")
    assert done.exit_code == 1
    events = {event["event"]: event for event in map(json.loads, done.output.splitlines())}
    verdict = events["verdict"]
    assert (verdict["exact"], verdict["lost"], verdict["duplicated"]) == (False, count, 0)
    (difference,) = verdict["differences"]
    assert difference["what"] == [ad, kind, minute]


def test_signals_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    demo(tmp_path / "demo", monkeypatch)
    assert before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_what_to_try_next_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it's here"
    demo(folder, monkeypatch)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("JAVA_HOME", "/opt/a java")
    commands = [c["command"] for c in next_commands(folder)]
    assert commands[0] == f"cd '{tmp_path}/it'\"'\"'s here'"
    assert commands[1:3] == [
        f"source {sys.prefix}/bin/activate", "export JAVA_HOME='/opt/a java'",
    ]  # fmt: skip
    (look,) = [c for c in commands if "SELECT" in c]
    said = subprocess.run(
        ["bash", "-ec", f"{commands[0]}; {look.replace('python ', sys.executable + ' ', 1)}"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert len(said.stdout.splitlines()) == 5


def test_json_tells_how_it_goes_at_most_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Json()
    for _ in range(10):
        screen.show({"event": "progress"})
        screen.show({"event": "killed"})
    said = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert said.count("progress") == 1
    assert said.count("killed") == 10


PROGRESS = {
    "event": "progress", "seconds": 61.25, "doing": "running", "appended": 1200, "read": 1000,
    "of": 63_670, "epoch": 3,
}  # fmt: skip


def test_a_terminal_has_a_live_line_that_fits_below_what_happened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    screen = Terminal(WORDS)
    screen.show(PROGRESS)
    screen.show({"event": "stopped", "seconds": 62.0, "epoch": 4})
    screen.show({**PROGRESS, "doing": "starting", "epoch": None})
    screen.close()
    # (click takes escapes away where there is no terminal)
    clear, live, happened, again, end = capsys.readouterr().out.split("\r")
    assert (clear, end) == ("", "")
    assert live == " 61.2 s  running: 1,200 of 63,670 rows appended, 1,000 proc"
    assert happened == " 62.0 s  stopped after epoch 4\n"
    assert again.startswith(" 61.2 s  Spark starts: ")


@pytest.mark.parametrize("decided", [True, False])
def test_a_kill_is_told_with_who_was_killed_and_what_becomes_of_the_epoch(
    decided: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["onceflow run", "driver", "JVM", "worker", "worker"]
    processes = [{"pid": pid, "what": what, "how": ""} for pid, what in enumerate(names, 11)]
    Plain(WORDS).show(
        {"event": "killed", "seconds": 9.0, "processes": processes, "epoch": 7, "decided": decided}
    )
    first, second = capsys.readouterr().out.splitlines()
    assert first == "  9.0 s  kill -9 of onceflow run 11, driver 12, JVM 13, 2 Python workers"
    fate = "decided, so it will be published" if decided else "not decided, so it runs anew"
    assert second.strip() == f"in the middle of epoch 7: {fate}"


# ---------------------------------------------------------------- the folder


def test_the_folder_of_a_demo_is_begun_anew_and_keeps_what_is_not_the_demos(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "demo"
    stage.prepare(folder, seed=1, events=2)
    assert (folder / "ads.py").read_text() == SHIPPED
    EmbeddedLog.create(folder / "events")
    (folder / "home").mkdir()
    (folder / "notes.txt").write_text("mine")
    stage.prepare(folder, seed=3, events=4)
    assert sorted(path.name for path in folder.iterdir()) == ["ads.py", "demo.json", "notes.txt"]
    assert json.loads((folder / "demo.json").read_text()) == {"seed": 3, "events": 4}


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with pytest.raises(JobError, match="not of a demo"):
        stage.prepare(tmp_path, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    (tmp_path / "file").touch()
    with pytest.raises(JobError, match="not a folder"):
        stage.prepare(tmp_path / "file", seed=1)


def test_a_job_file_that_was_changed_and_a_job_that_runs_are_not_replaced(tmp_path: Path) -> None:
    stage.prepare(tmp_path, seed=1)
    (tmp_path / "ads.py").write_text(SHIPPED + "# mine\n")
    with pytest.raises(JobError, match=r"ads\.py was changed"):
        stage.prepare(tmp_path, seed=1)
    (tmp_path / "ads.py").unlink()
    lease = Lease(tmp_path / "home" / "ads" / "lease", "ads")
    lease.acquire()
    lease.next_term(0)
    with pytest.raises(LeaseHeld, match="is led by process"):
        stage.prepare(tmp_path, seed=1)
    lease.release()
    stage.prepare(tmp_path, seed=1)


# ---------------------------------------------------------------- processes

FAMILY = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
if len(sys.argv) == 1:  # the supervisor, whose driver has a session of its own
    driver = subprocess.Popen([sys.executable, __file__, "driver"], start_new_session=True)
    print('{"event": "started", "pid": %d}' % driver.pid, flush=True)
else:
    subprocess.Popen(sleep)
    subprocess.Popen(sleep, process_group=0)  # as Spark's Python workers
    print('{"event": "ready"}', flush=True)
time.sleep(600)
"""


def family(tmp_path: Path) -> Run:
    (tmp_path / "family.py").write_text(FAMILY)
    return Run([sys.executable, "family.py"], tmp_path, tmp_path / "scratch")


def heard(run: Run, kind: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for event in run.events():
            if event["event"] == kind:
                return event
        time.sleep(0.01)
    raise AssertionError(f"no {kind}")


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who belongs to whom")
def test_a_kill_ends_the_whole_family_and_tells_that_it_was_the_signal(tmp_path: Path) -> None:
    with family(tmp_path) as run:
        driver = heard(run, "started")["pid"]
        heard(run, "ready")
        ended = run.kill(driver)
        assert [process.what for process in ended] == ["onceflow run", "driver", "worker", "worker"]
        assert {process.how for process in ended} == {"was ended by SIGKILL"}
        assert not any(alive(process.pid) for process in ended)
        assert run.kill(driver) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who belongs to whom")
def test_leaving_the_block_ends_the_whole_family_too(tmp_path: Path) -> None:
    with family(tmp_path) as run:
        driver = heard(run, "started")["pid"]
        heard(run, "ready")
    assert not alive(driver)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_frozen_driver_stands_still_and_goes_on(tmp_path: Path) -> None:
    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    with family(tmp_path) as run:
        driver = heard(run, "started")["pid"]
        heard(run, "ready")
        with frozen(driver):
            deadline = time.monotonic() + 10
            while state(driver) != "T":
                assert time.monotonic() < deadline
        deadline = time.monotonic() + 10
        while state(driver) == "T":
            assert time.monotonic() < deadline


def test_a_table_of_rows_fits_a_log_with_the_default_columns(tmp_path: Path) -> None:
    stream = Stream(seed=1, events=1000)
    log = EmbeddedLog.create(tmp_path / "events")
    assert log.append(table(stream.commits()[0])).rows == len(stream.commits()[0])
    (batch,) = log.read(columns=["value", "event_time"])
    assert batch.to_pylist() == [
        {"value": row.value, "event_time": row.event_time} for row in stream.commits()[0]
    ]


def test_what_a_killed_jvm_leaves_goes_where_the_demo_can_remove_it(tmp_path: Path) -> None:
    program = "import json, os; print(json.dumps({'event': 'x', **os.environ}))"
    with Run([sys.executable, "-c", program], tmp_path, tmp_path / "scratch") as run:
        settings = heard(run, "x")
    assert settings["SPARK_LOCAL_DIRS"] == str(tmp_path / "scratch")
    assert f'-Djava.io.tmpdir="{tmp_path}/scratch"' in settings["JDK_JAVA_OPTIONS"]
    assert os.path.isdir(tmp_path / "scratch")
