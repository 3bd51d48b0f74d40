"""`onceflow log` as people and programs use it: answers, refusals, exit codes, bad days."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from onceflow import faults
from onceflow.cli import cli, main
from onceflow.cli.log import command as log_group
from onceflow.contract.ledger import Position
from onceflow.log import EmbeddedLog, segments
from onceflow.log.reader_positions import Reader, hold, readers
from onceflow.log.retention import expired, retain, trim
from onceflow.log.segments import read_slice
from onceflow.log.tail import last_slices
from onceflow.log.take_back import take_back
from onceflow.store.posix import seal

ONCEFLOW = [sys.executable, "-c", "from onceflow.cli import main; main()"]
SECONDS = 60


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`onceflow log …` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def onceflow(*arguments: object, stdin: str | bytes = b"") -> Done:
        monkeypatch.setattr(sys, "argv", ["onceflow", "log", *map(str, arguments)])
        data = stdin.encode() if isinstance(stdin, str) else stdin
        with CliRunner().isolation(input=data) as (out, err, *_):
            code = 0
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            return Done(code, out.getvalue().decode(), err.getvalue().decode())

    return onceflow


def process(*arguments: object, cwd: Path, **more: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*ONCEFLOW, "log", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1"},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
    )


def json_lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def values(log: EmbeddedLog | str) -> list[Any]:
    log = EmbeddedLog(log) if isinstance(log, str) else log.refresh()
    return [value for batch in log.read(columns=["value"]) for value in batch[0].to_pylist()]


def append_values(log: EmbeddedLog, *texts: str) -> None:
    empty = pa.nulls(len(texts), pa.timestamp("us", "UTC"))
    log.append(pa.table({"value": list(texts), "event_time": empty}))


def reader(log: EmbeddedLog, name: str, needs: list[int]) -> None:
    hold(log.path, Reader(name, "12345678-lineage", "/homes/a", needs, "2026-11-15T10:00:00Z"))


def files_of(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.glob("partition=*/*")}


# ---------------------------------------------------------------- help and reference


def test_these_are_the_commands() -> None:
    assert sorted(log_group.commands) == ["append", "create", "info", "tail", "trim"]
    assert "log" in cli.list_commands(click.Context(cli))


def test_the_commands_load_neither_spark_nor_arrow_before_they_work() -> None:
    code = (
        "import sys; from onceflow.cli import cli; from onceflow.cli.log import command; "
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()).isdisjoint({"pyspark", "py4j", "pyarrow", "numpy", "pandas"})


# ---------------------------------------------------------------- create


def test_a_log_is_created_with_what_was_asked_for(run: Run) -> None:
    done = run("create", "log", "--schema", "user string, n long, at timestamp", "--key", "user",
               "--key", "n", "--partitions", 4, "--retain", "7 days", "--retain-bytes", "1.5 GB",
               "--json")  # fmt: skip
    assert done.code == 0
    facts = EmbeddedLog("log").facts
    assert (facts.partitions, facts.key) == (4, ("user", "n"))
    assert (facts.retain_ms, facts.retain_bytes) == (7 * 86_400_000, 1_500_000_000)
    assert done.json == {
        "log": os.path.abspath("log"), "id": facts.id, "key": ["user", "n"], "partitions": 4,
        "columns": {"user": "string", "n": "long", "at": "timestamp"},
        "retain_ms": facts.retain_ms, "retain_bytes": facts.retain_bytes,
    }  # fmt: skip


def test_a_log_has_the_default_columns_unless_told(run: Run) -> None:
    done = run("create", "log")
    assert done.out == (
        f"created {os.path.abspath('log')}: 1 partition, value string, event_time timestamp\n"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--schema", "a lng"], "'lng' is not a type"),
        (["--schema", "a long, A long"], "twice"),
        (["--schema", "_offset long"], "a name that the log uses itself"),
        (["--partitions", "0"], "1 to 1024 partitions"),
        (["--key", "nope"], "no column nope"),
        (["--retain", "7 fortnights"], "is not a time"),
        (["--retain", "0 days"], "above zero"),
        (["--retain-bytes", "much"], "is not a size"),
        (["--partitions", "many"], "not a valid integer"),
    ],
)
def test_what_cannot_be_a_log_is_refused(run: Run, arguments: list[str], says: str) -> None:
    done = run("create", "log", *arguments)
    assert done.code == 2
    assert says in done.err
    assert not (Path("log") / "_commits").exists()


def test_nothing_is_created_over_something(run: Run, tmp_path: Path) -> None:
    run("create", "log")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    (tmp_path / "file").touch()
    for name, says in (("log", "is a log already"), ("mine", "other files: precious"),
                       ("file", "is not a folder")):  # fmt: skip
        done = run("create", name, "--json")
        assert done.code == 2
        assert says in json.loads(done.err)["message"]


# ---------------------------------------------------------------- append


def test_files_and_standard_input_are_one_commit(run: Run, tmp_path: Path) -> None:
    run("create", "log")
    (tmp_path / "a.json").write_text(json_lines({"value": "a"}))
    (tmp_path / "b.csv").write_text("event_time,value\n2026-11-15T10:00:00Z,b\n")
    (tmp_path / "c.txt").write_text("c\n")
    pq.write_table(
        pa.table({"value": ["d"], "event_time": pa.nulls(1, pa.timestamp("ms"))}), "d.parquet"
    )
    done = run("append", "log", "a.json", "b.csv", "c.txt", "d.parquet", "-", "--json",
               stdin=json_lines({"value": "e"}))  # fmt: skip
    assert done.code == 0
    assert done.json == {
        "log": os.path.abspath("log"), "rows": 5, "commit": 2, "already": False,
        "created": False, "rejected": 0, "reject": None,
    }  # fmt: skip
    assert values("log") == ["a", "b", "c", "d", "e"]
    assert EmbeddedLog("log").view.position == 2


def test_without_files_standard_input_is_read(run: Run) -> None:
    run("create", "log")
    assert run("append", "log", stdin=json_lines({"value": "a"})).code == 0
    assert run("append", "log", "--format", "text", stdin="b\nc").code == 0
    done = run("append", "log", "--format", "csv", stdin="value\nd\n")
    assert done.out == f"appended 1 row to {os.path.abspath('log')} (commit 4)\n"
    assert values("log") == ["a", "b", "c", "d"]
    assert run("append", "log", "-", "-").code == 2


def test_one_bad_line_refuses_all(run: Run, tmp_path: Path) -> None:
    run("create", "log")
    (tmp_path / "good.json").write_text(json_lines({"value": "a"}))
    (tmp_path / "bad.json").write_text('{"value": "b"}\n{"value": 7}\n{"other": 1}\n')
    done = run("append", "log", "good.json", "bad.json")
    assert done.code == 9
    assert done.err.splitlines() == [
        "error: 2 lines do not fit, so nothing was appended:",
        "  bad.json, line 2: value: 7 is not of type string",
        '  bad.json, line 3: there is no column "other"',
        "  fix: correct them, or send them to a file of their own: --reject FILE",
    ]
    assert values("log") == []
    assert files_of(tmp_path / "log") == set()
    error = json.loads(run("append", "log", "bad.json", "--json").err)
    assert (error["kind"], error["exit_code"]) == ("BadInput", 9)


def test_bad_lines_can_be_set_apart(run: Run, tmp_path: Path) -> None:
    run("create", "log")
    bad = '{"value": 7}\n{"value": \n'
    done = run("append", "log", "--reject", "bad", stdin=bad + json_lines({"value": "a"}))
    assert done.code == 0
    assert done.out.splitlines()[1] == "2 lines did not fit, and are in bad"
    assert (tmp_path / "bad").read_text() == bad
    assert values("log") == ["a"]
    again = run("append", "log", "--reject", "bad", stdin=json_lines({"value": "b"}))
    assert again.code == 2
    assert "bad exists already" in again.err
    assert values("log") == ["a"]


def test_rejects_are_on_disk_before_the_commit(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EmbeddedLog.create("log")
    seen: list[str] = []
    commit = EmbeddedLog.commit_of

    def look(*arguments: Any) -> Any:
        seen.append((tmp_path / "bad").read_text())
        return commit(*arguments)

    monkeypatch.setattr(EmbeddedLog, "commit_of", look)
    run("append", "log", "--reject", "bad", stdin='7\n{"value":"a"}\n')
    assert seen == ["7\n"]
    assert values(log) == ["a"]


def test_an_append_that_is_tried_again_is_done_once(run: Run) -> None:
    """Also of text, whose event time is another one each time."""
    run("create", "log")
    again = ["append", "log", "--format", "text", "--producer", "import", "--sequence", 3]
    assert run(*again, "--json", stdin="a\nb\n").json["already"] is False
    done = run(*again, "--json", stdin="a\nb\n").json
    assert (done["already"], done["rows"], done["commit"]) == (True, 2, None)
    assert run(*again, stdin="a\nb\n").out.endswith("has these 2 rows already\n")
    other = run(*again, stdin="a\nc\n")
    assert other.code == 6
    assert "with other rows" in other.err
    assert run("append", "log", "--producer", "x", stdin="").code == 2
    assert values("log") == ["a", "b"]
    assert files_of(Path("log")) == {s.path for s in EmbeddedLog("log").segments([0], [2])}


@pytest.mark.kill
@pytest.mark.parametrize("point", ["put.written", "put.linked"])
def test_an_append_that_was_killed_is_there_once_after_the_next(
    run: Run, tmp_path: Path, point: str
) -> None:
    """Killed before its commit was there, and just behind it."""
    run("create", "log")
    arguments = ["append", "log", "rows.txt", "--producer", "import", "--sequence", "1"]
    (tmp_path / "rows.txt").write_text("a\nb\n")
    code = f"""
from onceflow import faults
faults.arm({point!r}, "kill")
from onceflow.cli import main
main()
"""
    killed = subprocess.run([sys.executable, "-c", code, "log", *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert values("log") == (["a", "b"] if point == "put.linked" else [])
    done = run(*arguments, "--json").json
    assert done["already"] is (point == "put.linked")
    assert values("log") == ["a", "b"]
    assert files_of(Path("log")) == {s.path for s in EmbeddedLog("log").segments([0], [2])}
    assert list(Path("log", "_appending").iterdir()) == []


def test_a_log_is_made_of_what_is_appended_first(run: Run) -> None:
    done = run("append", "new", "--format", "text", stdin="a\n")
    assert "which is new" in done.out
    assert run("append", "other", "--json", stdin=json_lines({"value": "a"})).json["created"]
    table = pa.table({"n": pa.array([1], pa.int16()), "tags": [["x"]]})
    pq.write_table(table, "a.parquet")
    assert run("append", "parquet", "a.parquet").code == 0
    assert run("info", "parquet", "--json").json["columns"] == {
        "n": "short", "tags": "array<string>",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("format", "text"), [("json", '{"user": "a"}\n'), ("csv", "user\na\n"), ("json", "")]
)
def test_no_log_is_made_for_rows_that_do_not_fit_or_for_none(
    run: Run, tmp_path: Path, format: str, text: str
) -> None:
    done = run("append", "new", "--format", format, stdin=text)
    assert done.code == (9 if text else 0)
    assert not (tmp_path / "new").exists()
    if text:
        assert 'there is no column "user"' in done.err
        assert "onceflow log create new --schema" in done.err
    else:
        assert done.out == "there was nothing to append\n"


def test_what_is_no_log_is_not_made_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    done = run("append", "mine", stdin=json_lines({"value": "a"}))
    assert done.code == 2
    assert "is not a log" in done.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["precious"]


def test_a_parquet_file_that_does_not_fit_is_refused(run: Run) -> None:
    run("create", "log")
    pq.write_table(pa.table({"value": ["a"], "when": [1]}), "a.parquet")
    done = run("append", "log", "a.parquet")
    assert done.code == 2
    assert "event_time is missing, when is not a column of the log" in done.err
    assert values("log") == []


@pytest.mark.parametrize("seed", range(3))
def test_random_rows_go_in_and_out(run: Run, seed: int) -> None:
    """Through the commands alone, in random files, formats and partitions."""
    rng = random.Random(seed)
    run("create", "log", "--schema", "id long, text string", "--partitions", rng.choice([1, 3]))
    rows: dict[int, str | None] = {}
    for _ in range(5):
        some = {
            len(rows) + n: rng.choice([None, "", "ä,\"'\n\r\t", f"text {n}", "null"])
            for n in range(rng.randrange(1, 40))
        }
        rows |= some
        if rng.random() < 0.5:
            lines = json_lines(*({"text": text, "id": n} for n, text in some.items()))
            assert run("append", "log", stdin=lines).code == 0
        else:
            cells = [
                "" if text is None else '"' + text.replace('"', '""') + '"'
                for text in some.values()
            ]
            lines = "".join(f"{n},{text}\r\n" for n, text in zip(some, cells, strict=True))
            assert run("append", "log", "--format", "csv", stdin="id,text\r\n" + lines).code == 0
    found = run("tail", "log", "-n", 1000, "--json", "--columns", "id,text").lines
    assert {row["id"]: row["text"] for row in found} == rows, f"seed {seed}"
    assert len(found) == len(rows)
    some = rng.randrange(len(rows))
    assert (
        run("tail", "log", "-n", some, "--json", "--columns", "id,text").lines
        == (found[len(found) - some :])
    ), f"seed {seed}"


# ---------------------------------------------------------------- tail


def test_tail_shows_the_last_rows_in_their_order(run: Run) -> None:
    log = EmbeddedLog.create("log", partitions=2)
    for n in range(20):
        append_values(log, f"{n}a", f"{n}b")
    shown = run("tail", "log").out.splitlines()
    assert len(shown) == 10
    assert shown[-1].startswith("1:19  20")
    assert shown[-1].endswith("Z  value=19b  event_time=null")
    rows = run("tail", "log", "-n", 3, "--json").lines
    assert [row["value"] for row in rows] == ["18b", "19a", "19b"]
    assert set(rows[0]) == {"value", "event_time", "_partition", "_offset", "_appended_at"}
    only = run("tail", "log", "-n", 3, "--partition", 0, "--json", "--columns", "value").lines
    assert only == [{"value": "16b"}, {"value": "18a"}, {"value": "18b"}]
    assert run("tail", "log", "-n", 0).out == ""
    assert len(run("tail", "log", "-n", 1000).out.splitlines()) == 40


def test_tail_begins_where_it_is_told(run: Run) -> None:
    log = EmbeddedLog.create("log", partitions=2)
    for n in range(6):
        append_values(log, f"{n}")

    def found(*arguments: object) -> list[str]:
        done = run("tail", "log", "--json", "--columns", "value", *arguments)
        assert done.code == 0, done.err
        return [row["value"] for row in done.lines]

    assert found("--from", "0:2,1:1") == ["3", "4", "5"]
    assert found("--from", "1", "--partition", 1) == ["3", "5"]
    assert found("--from", "0:0", "-n", 2) == ["0", "1"]
    at = [batch["_appended_at"][0].value for batch in log.read(columns=["_appended_at"])]
    time_of_3 = run("tail", "log", "--json").lines[3]["_appended_at"]
    assert found("--from", time_of_3) == [str(n) for n in range(6) if at[n] >= at[3]]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--from", "5"], 2, "offset 5 needs a partition"),
        (["--from", "7:0"], 2, "no partition 7"),
        (["--from", "0:99"], 9, "is not there"),
        (["--from", "yesterday"], 2, "is no time"),
        (["--from", "2999-01-01"], 9, "in the future"),
        (["--partition", "2"], 2, "no partition 2"),
        (["--columns", "valu"], 2, "no column valu"),
        (["--columns", ""], 2, "no column"),
        (["-n", "-1"], 2, "not in the range"),
    ],
)
def test_a_tail_that_is_not_there_is_refused(
    run: Run, arguments: list[str], code: int, says: str
) -> None:
    EmbeddedLog.create("log", partitions=2)
    done = run("tail", "log", *arguments)
    assert (done.code, done.out) == (code, "")
    assert says in done.err


def test_tail_reads_only_the_newest_of_a_long_log(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 2)
    log = EmbeddedLog.create("log")
    for n in range(60):
        append_values(log, str(n))
    log = EmbeddedLog("log")
    assert len(log.view.manifests) > 4
    read: list[str] = []
    manifest, slices = log.commit_log.read_manifest, last_slices(log, 3)
    monkeypatch.setattr(log.commit_log, "read_manifest", lambda n: (read.append(n), manifest(n))[1])
    assert last_slices(log, 3) == slices
    assert len(read) <= 3
    assert [part.segment.first for part in slices] == [57, 58, 59]
    everything = last_slices(log, 1000)
    assert [part.segment.first for part in everything] == list(range(60))


def test_who_looks_while_others_trim_looks_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 2)
    log = log_of(21)
    tailing, trimming = EmbeddedLog("log"), EmbeddedLog("log")
    trim(log, [18])
    assert log.view.forgotten > 0
    assert sum(part.take for part in last_slices(tailing, 10)) == 3
    assert expired(trimming, keep_bytes=1) == [20]


def test_tail_passes_by_what_is_trimmed_or_taken_back(run: Run) -> None:
    log = EmbeddedLog.create("log")
    append_values(log, "a", "b", "c")
    publish(log, epoch=1, text="taken back")
    append_values(log, "d")
    trim(log, [1])
    take_back(log, "j/q/o", cut=Position("old", 0), to=Position("new", 0), term=1)
    assert [row["value"] for row in run("tail", "log", "--json").lines] == ["b", "c", "d"]
    assert [row["_offset"] for row in run("tail", "log", "-n", 2, "--json").lines] == [2, 4]
    described = run("info", "log", "--json").json
    assert described["rows"] == 3
    assert described["bytes"] == sum(
        (Path("log") / path).stat().st_size for path in files_of(Path("log"))
    )


def publish(log: EmbeddedLog, *, epoch: int, text: str) -> None:
    """What a job's output does, without the job."""
    (Path(log.path) / "partition=0").mkdir(exist_ok=True)
    path = f"partition=0/epoch-{epoch}.parquet"
    empty = pa.nulls(1, pa.timestamp("us", "UTC"))
    size, crc = segments.write_segment(
        pa.table({"value": [text], "event_time": empty}), log.path / path
    )
    file = {"path": path, "partition": 0, "rows": 1, "bytes": size, "crc32": crc}
    ledger = {"output": "j/q/o", "term": 1, "lineage": "old", "epoch": epoch, "decision": "d"}
    log.commit_log.append(lambda: {"type": "epoch", **ledger, **log.commit_of([file])})
    log.refresh()


def test_values_that_could_be_misread_are_quoted(run: Run) -> None:
    EmbeddedLog.create("log", "b binary, d decimal(5,2), s string, a array<date>, f float")
    line = {"b": "AP8=", "d": "1.5", "s": "\x1b[2J x", "a": ["2026-01-02", None], "f": 0.1}
    run("append", "log", stdin=json_lines(line))
    shown = run("tail", "log").out
    assert "\x1b" not in shown
    assert shown.partition("Z  ")[2] == (
        'b="AP8="  d=1.50  s="\\u001b[2J x"  a=["2026-01-02", null]  f=0.1\n'
    )
    again = run("tail", "log", "--json", "--columns", "b,d,s,a,f").lines
    assert again == [{**line, "d": "1.50"}]


# ---------------------------------------------------------------- following


@contextmanager
def following(cwd: Path, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    tail = process("tail", "log", "-f", *arguments, cwd=cwd)
    try:
        yield tail
    finally:
        tail.kill()
        tail.communicate()


def test_following_shows_what_is_committed_until_ctrl_c(tmp_path: Path) -> None:
    log = EmbeddedLog.create(tmp_path / "log")
    append_values(log, "a", "b")
    with following(tmp_path, "-n", 1, "--json", "--columns", "value") as tail:
        assert tail.stdout is not None
        assert json.loads(tail.stdout.readline()) == {"value": "b"}
        append_values(log, "c", "d")
        append_values(log, "e")
        found = [json.loads(tail.stdout.readline())["value"] for _ in range(3)]
        assert found == ["c", "d", "e"]
        tail.send_signal(signal.SIGINT)
        out, err = tail.communicate(timeout=SECONDS)
        assert (tail.returncode, out, err) == (0, "", "")


def test_a_tail_that_nobody_reads_any_more_just_ends(tmp_path: Path) -> None:
    """While it waits for a row that may never come, and while it writes."""
    log = EmbeddedLog.create(tmp_path / "log")
    append_values(log, *("x" * 1000 for _ in range(1000)))
    with following(tmp_path, "-n", 1) as waiting, following(tmp_path, "--from", 0) as writing:
        for tail in (waiting, writing):
            assert tail.stdout is not None
            assert tail.stderr is not None
            tail.stdout.readline()
            tail.stdout.close()
            assert tail.wait(SECONDS) == 0
            assert tail.stderr.read() == ""
            tail.stdout = None


def test_following_from_a_place_ends_after_so_many(run: Run) -> None:
    append_values(EmbeddedLog.create("log"), "a", "b", "c")
    done = run("tail", "log", "-f", "--from", 0, "-n", 2, "--json", "--columns", "value")
    assert (done.code, done.lines) == (0, [{"value": "a"}, {"value": "b"}])


# ---------------------------------------------------------------- info


def test_info_says_what_is_in_a_log_and_who_needs_it(run: Run) -> None:
    run("create", "log", "--partitions", 2, "--retain", "2 days", "--retain-bytes", "1 GB")
    log = EmbeddedLog("log")
    for n in range(4):
        append_values(log, str(n))
    run("append", "log", "--producer", "import", "--sequence", 7, stdin=json_lines({"value": "x"}))
    publish(log.refresh(), epoch=5, text="y")
    trim(log, [1, 0])
    reader(log, "job/query/source", [0, 1])
    found = run("info", "log", "--json").json
    assert found["partitions"] == [
        {"partition": 0, "earliest": 1, "next": 4, "rows": 3},
        {"partition": 1, "earliest": 0, "next": 2, "rows": 2},
    ]
    assert (found["rows"], found["commits"]) == (5, 9)
    assert found["bytes"] == sum((log.path / path).stat().st_size for path in files_of(log.path))
    assert found["created"] <= found["last_append"] <= time.strftime("%Y-%m-%dT%H:%M:%S.999Z",
                                                                     time.gmtime())  # fmt: skip
    assert found["producers"] == [
        {"name": "import", "sequence": 7},
        {"name": "j/q/o", "term": 1, "lineage": "old", "epoch": 5},
    ]
    (one,) = found["readers"]
    assert (one["name"], one["home"], one["needs"], one["holds_rows"]) == (
        "job/query/source", "/homes/a", [0, 1], 4,
    )  # fmt: skip
    text = run("info", "log").out
    for words in (
        "value string, event_time timestamp", "2 d and 1,000,000,000 bytes", "5 rows",
        "sequence 7", "epoch 5 of old, term 1", "job/query/source", "4 rows",
    ):  # fmt: skip
        assert words in text


def test_info_of_an_empty_log(run: Run) -> None:
    run("create", "log")
    found = run("info", "log", "--json").json
    assert (found["rows"], found["bytes"], found["last_append"]) == (0, 0, None)
    assert found["created"] is not None
    assert (found["producers"], found["readers"]) == ([], [])
    assert "everything" in run("info", "log").out


def test_what_info_says_survives_roll_ups(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 4)
    log = EmbeddedLog.create("log")
    created = run("info", "log", "--json").json["created"]
    for n in range(9):
        append_values(log, str(n))
        if n == 4:
            trim(log, [3])
    for n in range(3):
        log.append([], producer="nothing", sequence=n)
    found = run("info", "log", "--json").json
    assert log.refresh().view.rolled_up > 8
    assert found["created"] == created
    assert (found["rows"], found["partitions"][0]["earliest"]) == (6, 3)
    assert found["bytes"] == sum((log.path / path).stat().st_size for path in files_of(log.path))
    last = run("tail", "log", "-n", 1, "--json").lines[0]["_appended_at"]
    assert found["last_append"][:-1] == last[:-4]  # not the appends of nothing


# ---------------------------------------------------------------- trim


def log_of(count: int) -> EmbeddedLog:
    """Commits 2 to count + 1 with a row each, some microseconds apart."""
    log = EmbeddedLog.create("log")
    for n in range(count):
        append_values(log, str(n))
    return log


def at_of(log: EmbeddedLog, offset: int) -> int:
    (segment,) = log.segments([offset], [offset + 1])
    return segment.at


def test_trim_takes_what_lies_below(run: Run) -> None:
    log = log_of(4)
    append_values(log, "4", "5")
    sizes = {s.path: s.bytes for s in log.segments([0], [6])}
    dry = run("trim", "log", "--below", 5, "--dry-run", "--json").json
    assert values(log) == list("012345")
    done = run("trim", "log", "--below", "0:5", "--json").json
    assert values(log) == ["5"]
    left = files_of(log.path)
    gone = {path: size for path, size in sizes.items() if path not in left}
    assert done == {
        "log": str(log.path), "rows": 5, "files": 4, "bytes": sum(gone.values()),
        "earliest": [5], "dry_run": False,
    }  # fmt: skip
    assert dry == {**done, "dry_run": True}
    again = run("trim", "log", "--below", 5)
    assert again.out == "removed 0 rows (0 files, 0 bytes); the earliest offsets are 0:5\n"


def test_trim_takes_what_is_older(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of(6)
    at = at_of(log, 2)
    iso = run("tail", "log", "--json").lines[2]["_appended_at"]
    assert run("trim", "log", "--before", iso, "--json").json["rows"] == 2
    assert values(log) == list("2345")
    assert run("trim", "log", "--older-than", "1 day", "--json").json["rows"] == 0
    monkeypatch.setattr(time, "time_ns", lambda: (at + 1) * 1000 + 86_400 * 10**9)
    assert run("trim", "log", "--older-than", "1 day", "--json").json["rows"] == 1
    assert values(log) == list("345")


@pytest.mark.parametrize("rolled", [2, 16])
def test_trim_keeps_at_least_so_many_bytes(
    run: Run, rolled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", rolled)
    log = log_of(10)
    size = [s.bytes for s in log.segments([0], [10])]
    keep = sum(size[-3:]) - 1
    assert run("trim", "log", "--keep-bytes", f"{keep} B", "--json").json["rows"] == 7
    assert values(log) == list("789")
    assert run("trim", "log", "--keep-bytes", "1 GB", "--json").json["rows"] == 0
    assert run("trim", "log", "--keep-bytes", "0 B", "--json").json["rows"] == 3
    assert values(log) == []
    append_values(log, "10")
    assert values(log) == ["10"]


def test_a_log_retains_what_it_was_created_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rules as `trim --keep-bytes`, by themselves, and never what a reader needs."""
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 4)
    run("create", "log", "--retain-bytes", "1 B")
    log = EmbeddedLog("log")
    for n in range(3):
        append_values(log, str(n))
    reader(log, "job/q/s", [2])
    for n in range(3, 12):
        append_values(log, str(n))
    assert values(log)[0] == "2"
    assert run("trim", "log", "--forget", "job").code == 0
    retain(log.refresh())
    assert values(log) == ["11"]


def test_trim_stops_at_readers_and_names_them(run: Run) -> None:
    log = log_of(5)
    reader(log, "job/query/source", [2])
    for way in (["--below", 3], ["--keep-bytes", "0 B"]):
        for dry in ([], ["--dry-run"]):
            done = run("trim", "log", *way, *dry)
            assert done.code == 2
            assert "reader job/query/source (home /homes/a" in done.err
            assert "--forget job/query/source" in done.err
    assert run("trim", "log", "--below", 2).code == 0
    assert run("trim", "log", "--forget", "job", "--dry-run").out.startswith("would forget job/q")
    assert len(readers("log")) == 1
    assert run("trim", "log", "--forget", "job", "--json").json == {
        "log": str(log.path), "forgot": ["job/query/source"], "dry_run": False,
    }  # fmt: skip
    assert run("trim", "log", "--forget", "job").code == 2
    assert run("trim", "log", "--below", 3).code == 0


def test_a_reader_that_needs_what_is_gone_holds_only_what_is_left(run: Run) -> None:
    """A job that starts at the earliest rows says 0, also if the log begins later."""
    log = EmbeddedLog.create("log", partitions=2)
    for n in range(8):
        append_values(log, str(n))
    trim(log, [2, 0])
    reader(log, "job/q/s", [0, 3])
    assert run("trim", "log", "--below", "1:2").code == 0
    assert run("trim", "log", "--below", "1:4").code == 2
    assert run("trim", "log", "--below", "0:3").code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([], 2, "needs exactly one"),
        (["--below", "1", "--before", "2026-01-01"], 2, "needs exactly one"),
        (["--below", "2"], 9, "it cannot be trimmed to 0:2"),
        (["--below", "x"], 2, "not a place"),
        (["--below", "1:0"], 2, "no partition 1"),
        (["--before", "2999-01-01"], 2, "in the future"),
        (["--before", "1700000000"], 2, "is no time"),
        (["--older-than", "7"], 2, "is not a time"),
        (["--keep-bytes", "7"], 2, "is not a size"),
        (["--forget", "nobody"], 2, "no reader is called nobody"),
    ],
)
def test_a_trim_that_makes_no_sense_is_refused(
    run: Run, arguments: list[str], code: int, says: str
) -> None:
    log = log_of(1)
    done = run("trim", "log", *arguments)
    assert done.code == code
    assert says in done.err
    assert values(log) == ["0"]


def test_a_trim_that_was_killed_is_finished_by_the_next(run: Run) -> None:
    log = log_of(4)
    faults.arm("trim.removed-one", "raise")
    with pytest.raises(faults.InjectedFault):
        trim(log, [3])
    assert run("trim", "log", "--below", 3, "--json").json["rows"] == 0
    assert len(files_of(log.path)) == 1
    found = run("info", "log", "--json").json
    assert found["bytes"] == sum((log.path / path).stat().st_size for path in files_of(log.path))


# ---------------------------------------------------------------- bad days

EVERY = [["append"], ["tail"], ["info"], ["trim", "--below", "0"]]


@pytest.mark.parametrize("command", EVERY, ids=lambda command: command[0])
def test_what_is_no_log_is_named(run: Run, tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "file").write_text("x")
    first, *rest = command
    done = run(first, "file", *rest)
    assert done.code == 2
    assert "file is not a log" in done.err
    if first != "append":
        done = run(first, "none", *rest)
        assert done.code == 2
        assert "does not exist" in done.err
        assert "onceflow log create" in done.err


@pytest.mark.parametrize("command", EVERY, ids=lambda command: command[0])
def test_a_newer_log_is_told_from_a_damaged_one(run: Run, command: list[str]) -> None:
    log = log_of(1)
    path = log.path / "_commits" / f"{2:012d}.json"
    first, *rest = command
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    done = run(first, "log", *rest)
    assert done.code == 7
    assert f"{path} is damaged" in done.err
    newer = seal("log commit", "log", {}).replace(b'"version": 1', b'"version": 2')
    path.write_bytes(newer)
    done = run(first, "log", *rest)
    assert done.code == 7
    assert "newer onceflow" in done.err


def test_a_damaged_segment_is_named(run: Run) -> None:
    log = log_of(2)
    (path,) = [log.path / segment.path for segment in log.segments([1], [2])]
    whole = path.read_bytes()
    for broken in (whole[:-1], b"PAR1" + b"\0" * (len(whole) - 8) + b"PAR1"):
        path.write_bytes(broken)
        done = run("tail", "log")
        assert done.code == 7
        assert str(path) in done.err
    path.unlink()
    assert "is missing" in run("tail", "log").err
    assert run("tail", "log", "--from", 0, "-n", 1).code == 0  # what is whole can be read


def test_a_damaged_reader_is_named(run: Run) -> None:
    log = log_of(1)
    reader(log, "job/q/s", [0])
    (path,) = (log.path / "_readers").iterdir()
    path.write_bytes(b"{}")
    for arguments in (["info"], ["trim", "--below", "1"]):
        done = run(arguments[0], "log", *arguments[1:])
        assert done.code == 7
        assert str(path) in done.err


def test_a_full_disk_appends_nothing_and_leaves_nothing(run: Run, small_disk: Path) -> None:
    log = EmbeddedLog.create(small_disk / "log")
    append_values(log, "a")
    before = files_of(log.path)
    text = "".join(random.Random(1).choices("abcdefgh\n", k=600_000))
    done = run("append", log.path, "--format", "text", stdin=text)
    assert done.code == 75
    assert "no space left" in done.err
    assert "append again" in done.err
    assert files_of(log.path) == before
    assert list((log.path / "_appending").iterdir()) == []
    assert run("append", log.path, "--format", "text", stdin="b").code == 0
    assert values(log) == ["a", "b"]


def test_a_disk_that_fills_up_after_the_commit_is_no_failure(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows are there: whoever heard that they are not would append them again."""
    log = EmbeddedLog.create("log")
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 2)
    faults.arm("rollup.written", no_space)
    done = run("append", "log", stdin=json_lines({"value": "a"}))
    assert done.code == 0
    assert done.out.endswith("(commit 2)\n")
    assert values(log) == ["a"]


def no_space(_: str) -> None:
    raise OSError(28, "No space left on device")


def test_the_commit_that_is_told_is_the_one_that_was_made(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the log trimmed itself behind it, which makes commits of its own."""
    monkeypatch.setattr(EmbeddedLog, "roll_up_every", 2)
    run("create", "log", "--retain-bytes", "1 B")
    log, made = EmbeddedLog("log"), []
    for n in range(12):
        done = run("append", "log", "--json", stdin=json_lines({"value": str(n)})).json
        made.append(done["commit"])
        assert [c["commit"] for c in log.refresh().commit_log.published()][-1] == done["commit"]
    assert made == sorted(set(made))
    assert made[-1] > 13


def test_rejects_on_a_full_disk_refuse_the_append(run: Run, small_disk: Path) -> None:
    log = EmbeddedLog.create("log")
    bad = "x" * 1000 + "\n"
    done = run("append", "log", "--reject", small_disk / "bad", stdin='{"value":"a"}\n' + bad * 500)
    assert done.code == 75
    assert values(log) == []
    assert not (small_disk / "bad").exists()


@contextmanager
def nobody() -> Iterator[None]:
    """Root may do anything: be somebody else for a while."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
    else:
        yield


def test_no_permission_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json_lines({"value": "b"})
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        os.chmod(folder, 0o755)
        monkeypatch.chdir(folder)
        log = log_of(1)
        assert run("tail", "log").code == 0
        assert run("append", "log", stdin=rows).code == 0
        for name, mode, arguments in (
            ("_appending", 0o555, ["append", "log"]),
            ("_commits", 0o000, ["tail", "log"]),
            ("partition=0", 0o000, ["tail", "log"]),
        ):
            (log.path / name).chmod(mode)
            with nobody():
                done = run(*arguments, stdin=rows)
            (log.path / name).chmod(0o755)
            assert done.code == 4
            assert "Permission denied" in done.err
        assert values("log") == ["0", "b"]
        monkeypatch.chdir("/")


def test_a_segment_that_may_not_be_read_is_not_damaged(monkeypatch: pytest.MonkeyPatch,
                                                       run: Run) -> None:  # fmt: skip
    log = log_of(1)
    (part,) = log.slices([0], [1])

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(pq, "ParquetFile", refuse)
    with pytest.raises(PermissionError):
        list(read_slice(log.path, part, log.schema, ["value"]))
    assert run("tail", "log").code == 4


def test_what_killed_producers_left_is_swept_also_if_a_line_was_cut_off(run: Run) -> None:
    log = log_of(1)
    (log.path / "partition=0" / "dead-00000.parquet").write_bytes(b"x")
    journal = log.path / "_appending" / "dead"
    journal.write_text("2\npartition=0/dead-00000.parquet\npartition=0/")
    assert run("append", "log", stdin=json_lines({"value": "b"})).code == 0
    assert not journal.exists()
    assert len(files_of(log.path)) == 2
    assert values(log) == ["0", "b"]
