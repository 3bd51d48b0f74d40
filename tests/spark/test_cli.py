"""The command line as people and programs use it: answers, refusals, exit codes."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from commands import (
    SECONDS,
    environment,
    jvm_of,
    onceflow,
    patiently,
    running,
)
from story import Story, read_files
from waiting import wait_for

from onceflow.cli import cli
from onceflow.protocol.lease import Lease, host_name
from onceflow.protocol.step_times import Sums
from onceflow.service import driver
from onceflow.service.progress import ProgressMeter, QueryProgress

HEAD = "from onceflow import job, sources\nfrom onceflow.sinks import Files\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def job_file(path: Path, body: str, head: str = "") -> Path:
    """A job called `it` whose function has this body."""
    function = '@job("it")\ndef it(flow):\n' + textwrap.indent(textwrap.dedent(body), "    ")
    return write(path, HEAD + head + function)


# ---------------------------------------------------------------- help and reference


def commands() -> list[click.Command]:
    context = click.Context(cli)
    found = [cli.get_command(context, name) for name in cli.list_commands(context)]
    # the commands of a group are looked at in tests/unit/test_cli_log.py
    return [c for c in found if c is not None and not isinstance(c, click.Group)]


@pytest.mark.parametrize("arguments", [[], *([c.name] for c in commands())], ids=str)
def test_help_does_not_wait_for_spark(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom onceflow.cli import cli\n"
        f"cli({[*arguments, '--help']!r}, standalone_mode=False)\n"
        "print(sorted({'pyspark', 'pyarrow', 'py4j', 'numpy'} & set(sys.modules)))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert said.stdout.startswith("Usage: ")
    assert said.stdout.endswith("[]\n")


# ---------------------------------------------------------------- refused before Spark starts


def fake_java(folder: Path) -> str:
    java = write(folder / "bin" / "java", "#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    return str(folder)


ONE = HEAD + '@job("a")\ndef a(flow): ...\n'
Refused = tuple[str, list[str], dict[str, str], int, str]
REFUSED: dict[str, Refused] = {
    "no file": ("", [], {}, 2, "there is no file"),
    "no job": ("x = 1", [], {}, 2, "has no job"),
    "two jobs": (
        HEAD + '@job("a")\ndef a(flow): ...\n@job("b")\ndef b(flow): ...\n',
        [], {}, 2, "has 2 jobs: a, b",
    ),
    "syntax": ("x = 1\ndef f(:\n", [], {}, 2, "it.py, line 2: "),
    "raises": ("import json\n\njson.loads('{')\n", [], {}, 2, "it.py, line 3: JSONDecodeError"),
    "exits": ("import sys\nsys.exit(1)\n", [], {}, 2, "it.py, line 2: SystemExit"),
    "bad name": (HEAD + '@job("a/b")\ndef a(flow): ...\n', [], {}, 2, "it.py, line 3: 'a/b'"),
    "time": ("", ["--every", "5 parsecs"], {}, 2, "'5 parsecs' is not a time"),
    "master": ("", ["--master", "locl"], {}, 2, "'locl' is not a Spark master"),
    "home": (ONE, ["--home", "it.py/home"], {}, 4, "cannot be written to: Not a directory"),
    "remote home": ("", ["--home", "s3://bucket/home"], {}, 2, "is not a local path"),
    "no java": (ONE, [], {"JAVA_HOME": "none"}, 4, "Java"),
    "old java": (ONE, [], {"JAVA_HOME": "11"}, 4, "Java 11"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_a_mistake_is_told_in_a_line_with_its_fix_and_an_exit_code(
    case: str, tmp_path: Path
) -> None:
    text, options, settings, code, message = REFUSED[case]
    if case != "no file":
        write(tmp_path / "it.py", text)
    if case == "old java":
        settings = {"JAVA_HOME": fake_java(tmp_path / "java")}
    done = onceflow("run", "it.py", *options, cwd=tmp_path, **settings)
    said = done.stderr.splitlines()
    assert done.returncode == code, done.stderr
    assert len(said) == 2
    assert said[0].startswith("error: ")
    assert message in said[0]
    assert said[1].startswith("  fix: ")
    assert code == 4 or not (tmp_path / ".onceflow").exists()


def test_a_second_driver_is_refused_at_once_and_told_who_leads(tmp_path: Path) -> None:
    job_file(tmp_path / "it.py", "...")
    lease = Lease(tmp_path / ".onceflow" / "it" / "lease", "it")
    lease.acquire()
    lease.next_term(0)
    since = lease.holder().since  # type: ignore[union-attr]
    done = onceflow("run", "it.py", "--json", cwd=tmp_path)
    lease.release()
    error = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, error["event"], error["kind"]) == (5, "error", "LeaseHeld")
    assert f"process {os.getpid()} on {host_name()}, since {since}" in error["message"]
    assert "--take-over" in error["hint"]


def test_errors_are_json_where_json_is_asked_for(tmp_path: Path) -> None:
    for arguments, code in ((["status", "x"], 2), (["ledger"], 2), (["doctor", "--nonsense"], 2)):
        done = onceflow(*arguments, "--json", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (code, "")
        error = json.loads(done.stderr)
        assert error["event"] == "error"
        assert error["exit_code"] == code


# ---------------------------------------------------------------- refused by Spark or the data


class Deaf(driver.StopSignal):
    """The tests' own process keeps its signals."""

    def listen(self) -> None: ...


@pytest.fixture
def live(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Runs it.py in this process: exit code and the last event."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    (tmp_path / "in").mkdir()
    events: list[dict[str, Any]] = []

    def run() -> tuple[int, dict[str, Any]]:
        options = argparse.Namespace(
            job="it.py", home=".onceflow", fork=None, master=None, every=None, once=True,
            take_over=False,
        )  # fmt: skip
        tell = lambda event, **fields: events.append({"event": event, **fields})  # noqa: E731
        code = driver.run_job(options, tell, Deaf())
        return code, events[-1]

    return run


ROWS = 'rows = flow.read("rows", sources.Files("in", format="json", schema="id long"))\n'
OUT = 'flow.write("out", rows, to=Files("out"))\n'
UDF = """
from pyspark.sql import functions as F

@F.udf("long")
def picky(number):
    if number == 13:
        {}
    return number * 2

"""
DOUBLED = 'rows = rows.select(picky("id").alias("id"))\n'
WRONG: dict[str, tuple[str, str, int, bool, str]] = {
    "raises": ("x = 1\nraise ValueError('boom')", "", 2, False, "it.py, line 6: ValueError: boom"),
    "raises deeper": ("import json\njson.loads('{')", "", 2, False, "it.py, line 6: JSONDecode"),
    "writes nothing": (ROWS, "", 2, False, "job it writes nothing"),
    "no folder": (ROWS.replace('"in"', '"no"'), "", 2, False, "it.py, line 5: Files("),
    "no column": (
        ROWS + 'rows = rows.select("ido")\n' + OUT,
        "", 2, False, "it.py, line 6: AnalysisException: [UNRESOLVED_COLUMN.WITH_SUGGESTION] A "
        "column, variable, or function parameter with name `ido` cannot be resolved. Did you "
        "mean one of the following? [`id`].",
    ),
    "no watermark": (
        ROWS + 'rows = rows.groupBy("id").count()\n' + OUT,
        "", 2, False, "aggregations without watermark",
    ),
    "bad row": (ROWS + OUT, "", 9, False, "in/1.json, line 2 cannot be parsed: {"),
    "udf": (
        ROWS + DOUBLED + OUT, UDF.format("raise ValueError('unlucky')"),
        1, False, "it.py, line 9: ValueError: unlucky",
    ),
    "udf that may recover": (
        ROWS + DOUBLED + OUT, UDF.format("raise ConnectionError('no answer')"),
        75, True, "it.py, line 9: ConnectionError: no answer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_what_the_job_does_wrong_is_told_with_file_and_line(
    case: str, live: Callable[[], tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    body, head, code, retryable, message = WRONG[case]
    job_file(tmp_path / "it.py", body, head)
    row = '{"id": "x"}' if case == "bad row" else '{"id": 13}'
    write(tmp_path / "in" / "1.json", f'{{"id": 1}}\n{row}\n')
    found, event = live()
    assert event["event"] == "error"
    assert message in event["message"]
    assert "\n" not in event["message"]
    assert event["hint"]
    assert (found, event["exit_code"], event["retryable"]) == (code, code, retryable)


def test_a_target_that_was_set_back_is_told_with_exit_code_8(
    live: Callable[[], tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    job_file(tmp_path / "it.py", ROWS + OUT)
    write(tmp_path / "in" / "1.json", '{"id": 1}\n')
    assert live()[0] == 0
    for path in sorted((tmp_path / "out").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    code, event = live()
    assert (code, event["kind"], event["retryable"]) == (8, "TargetBehind", False)


# ---------------------------------------------------------------- a whole run


def test_a_job_with_prints_udfs_and_a_module_beside_it_runs_and_speaks_json(tmp_path: Path) -> None:
    write(tmp_path / "jobs" / "beside.py", "def ten_times(number):\n    return number * 10\n")
    head = """
        import sys
        from pyspark.sql import functions as F
        import beside

        print("said by the job")
        OFFSET = 1

        @F.udf("long")
        def scaled(number):
            return beside.ten_times(number) + OFFSET

        """
    body = ROWS + 'rows = rows.select("id", scaled("id").alias("scaled"))\n' + OUT
    job_file(tmp_path / "jobs" / "it.py", body, textwrap.dedent(head))
    write(tmp_path / "in" / "1.json", "".join(f'{{"id": {i}}}\n' for i in range(5)))

    done = onceflow("run", "jobs/it.py", "--once", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["event"] for event in events if event["event"] != "progress"]
    assert kinds == ["starting", "session", "started", "ended"]
    out = events[kinds.index("started")]["queries"]["out"]["outputs"]["out"]
    assert out == {"target": f"Files('{tmp_path / 'out'}')", "guarantee": "exactly-once"}
    (ended,) = events[-1]["queries"]
    assert (ended["rows_in"], ended["rows_out"], ended["epochs"], ended["epoch"]) == (5, 5, 1, 0)
    assert set(done.stderr.splitlines()) == {"said by the job"}
    assert read_files(tmp_path / "out") == Counter((i, i * 10 + 1) for i in range(5))

    (status,) = json.loads(onceflow("status", "--json", cwd=tmp_path).stdout)
    assert (status["job"], status["state"], status["leader"]) == ("it", "stopped", None)
    assert status["queries"][0]["epoch"] == 0
    (ledger,) = json.loads(onceflow("ledger", "it", "--json", cwd=tmp_path).stdout)
    assert (ledger["decided"], ledger["published"], ledger["term"]) == (0, 0, 1)
    found = {f["what"]: f for f in json.loads(onceflow("doctor", "--json", cwd=tmp_path).stdout)}
    assert found["job it"]["says"] == "stopped, nothing left behind"
    looked_at = {"java", "spark", "jars", "maven", "kafka connector", "home", "clocks", "leftovers"}
    assert looked_at <= set(found)
    for command in (["status"], ["ledger", "it"], ["doctor"]):
        text = onceflow(*command, cwd=tmp_path)
        assert text.returncode == 0
        assert max(map(len, text.stdout.splitlines())) <= 140


class OnTerminal:
    """A run on a terminal of 100 columns, whose keys it gets."""

    PROGRAM = (
        "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "from onceflow.cli import main; main()"
    )

    def __init__(self, *arguments: object, cwd: Path) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        settings = environment(TERM="xterm")
        settings.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, "run", *map(str, arguments)],
            cwd=cwd, env=settings, stdin=theirs, stdout=theirs, stderr=theirs,
            start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self._said = b""

    def said(self) -> str:
        """All that was ever drawn, without the movements of the cursor."""
        try:
            while data := os.read(self._ours, 65536):
                self._said += data
        except (BlockingIOError, OSError):
            pass
        text = self._said.decode().replace("\r\n", "\n").replace("\r\x1b[2K", "\n")
        return re.sub(r"\x1b\[\??\d*[A-Za-z]", "", text).replace("\r", "")

    def see(self, pattern: str) -> re.Match[str]:
        ended = lambda: self.process.poll() is not None  # noqa: E731
        wait_for(lambda: re.search(pattern, self.said()) or ended(), SECONDS)
        found = re.search(pattern, self.said())
        assert found is not None, self.said()
        return found

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_a_person_sees_live_lines_and_ctrl_c_stops_at_an_epochs_end(tmp_path: Path) -> None:
    story = Story(str(tmp_path), "stateful", "files")
    story.write_input(range(2))
    it = write(tmp_path / "it.py", story_file(story))
    with OnTerminal(it, "--home", story.home, cwd=tmp_path) as run:
        run.see(r"starting \S*it.py … \d s")
        led = run.see(r"job story, process (\d+), home ")
        run.see(r"result -> Files\('\S+'\): exactly-once")
        run.see(r"query +epoch +in +out +lag +published +watermark +state\n")
        run.see(r"result +\d+ .* rows/s .* rows/s .* s .* s ago +2026-01-01T\S+Z .* rows")
        story.write_input(range(2, 4))
        patiently(lambda: story.published() == story.expected(4))
        (status,) = json.loads(
            onceflow("status", "--home", story.home, "--json", cwd=tmp_path).stdout
        )
        assert (status["state"], status["leader"]["pid"]) == ("running", int(led[1]))
        jvm = jvm_of(int(led[1]))
        run.press(b"\x03")
        assert run.process.wait(SECONDS) == 0
        run.see("stopping when the running epoch is finished")
        run.see(r"result: [\d,]+ rows published in \d+ epochs since the last start")
        assert not running([int(led[1]), jvm])
        live = [line for line in run.said().splitlines() if line.startswith(("query ", "result "))]
        assert max(map(len, live)) <= 100
    story.check(files=4)


def story_file(story: Story) -> str:
    """A job file that runs the story."""
    return f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from story import Story
        it = Story({story.root!r}, {story.query!r}, {story.sinks!r}).job()
        """


class Clockwork:
    """A query whose every epoch is told by the test: what the meter sees of it, and the time."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.reports: list[dict[str, Any]] = []
        log = SimpleNamespace(decisions=[], last=None)
        spec = SimpleNamespace(outputs={"out": None}, on_bad=None)
        self.epochs = SimpleNamespace(
            log=log,
            opened_at=None,
            published_at=None,
            spec=spec,
            times=SimpleNamespace(sums=Sums()),
        )
        self.query = SimpleNamespace(recentProgress=self.reports, lastProgress=None)
        handle: Any = SimpleNamespace(started={"q": self})
        self.meter = ProgressMeter(handle, lambda: self.now)

    def epoch(self, *, rows: int, written: float, took: float) -> None:
        """An epoch over a file that was written at some time begins now and is published."""
        self.query.status = {"isDataAvailable": True, "isTriggerActive": False}
        log, number = self.epochs.log, len(self.epochs.log.decisions)
        began = datetime.fromtimestamp(self.now, UTC).isoformat().replace("+00:00", "Z")
        self.now += took
        source = {"lines": {str(number): [json.dumps({"timestamp": written * 1000})]}}
        log.last = SimpleNamespace(
            epoch=number, rows=rows // 2, at=began, watermark=0, lowest_watermark=None,
            sources=source,
            keyed={}, outputs={"out": SimpleNamespace(files=[SimpleNamespace(rows=rows // 2)])},
        )  # fmt: skip
        log.decisions.append(log.last)
        self.epochs.published_at = self.now
        self.reports.append({
            "timestamp": began, "batchId": number, "numInputRows": rows, "stateOperators": [],
            "batchDuration": int(took * 1000), "durationMs": {"addBatch": 1},
        })  # fmt: skip
        self.query.lastProgress = self.reports[-1]

    def look(self) -> QueryProgress:
        (found,) = self.meter.look()
        return found

    def idle(self, seconds: float) -> QueryProgress:
        self.query.status = {"isDataAvailable": False, "isTriggerActive": False}
        self.now += seconds
        return self.look()


def test_a_query_that_keeps_up_has_a_steady_rate_and_a_small_lag() -> None:
    query = Clockwork()
    for _ in range(100):  # a file a second, read at once, published after 0.4 s
        query.epoch(rows=1000, written=query.now, took=0.4)
        steady = query.look()
        query.now += 0.6
    assert steady.lag_s == pytest.approx(0.4)
    assert steady.rows_in_per_s == pytest.approx(1000, rel=0.1)
    assert steady.rows_out_per_s == pytest.approx(500, rel=0.1)
    assert (steady.rows_in, steady.rows_out, steady.epochs) == (100_000, 50_000, 100)
    assert steady.outputs == {"out": 50_000}
    query.idle(5)
    idle = query.idle(15)
    assert (idle.lag_s, idle.rows_in_per_s, idle.rows_out_per_s) == (0, 0, 0)
    assert idle.published_s_ago == pytest.approx(20.6)


def test_a_query_that_falls_behind_has_a_lag_that_grows() -> None:
    query = Clockwork()
    lags = []
    for second in range(10):  # a file a second, but an epoch takes three
        query.epoch(rows=10, written=1_000_000.0 + second, took=3)
        lags.append(query.look().lag_s)
    assert lags == [3 + 2 * second for second in range(10)]


def test_old_files_that_appear_now_have_not_waited_for_years() -> None:
    query = Clockwork()
    query.idle(100)
    query.epoch(rows=10, written=0, took=2)
    assert query.look().lag_s == 2
