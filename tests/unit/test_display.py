"""How long commands show what happens: on a terminal, in a log, as JSON."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from rich.console import ConsoleDimensions

from onceflow.cli.display import Json, Live, Plain, Report, display, paint, table
from onceflow.cli.run import RunReport, live_table


class Counting(Report):
    def lines(self, event: dict[str, Any]) -> list[str]:
        return [f"{event['event']} {event['number']}"]


def event(name: str, number: object = 1) -> dict[str, Any]:
    return {"event": name, "number": number}


def drawn(written: str) -> list[str]:
    """What a terminal shows after it was written to: the movements that we use, and no others."""
    lines, at, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\??\d*[a-zA-Z]|\n|\r|[^\x1b\n\r]+", written):
        if part == "\n":
            at, column = at + 1, 0
            lines += [""] * (at == len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part == "\x1b[1A":
            at -= 1
        elif part.startswith("\x1b"):
            assert part in ("\x1b[?25l", "\x1b[?25h"), part
        else:
            lines[at] = lines[at][:column] + part + lines[at][column + len(part) :]
            column += len(part)
    return lines


def test_a_terminal_has_live_lines_that_fit_below_what_happened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    live = Live(Counting())
    live.show(event("progress", "x" * 40))
    live.show(event("killed"))
    live.show(event("long", "y" * 40))
    said = capsys.readouterr().out
    assert drawn(said) == ["killed 1", f"long {'y' * 40}", f"progress {'x' * 10}…"]
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l"), "the cursor is there"
    for _ in range(3):
        live.tick()
    assert capsys.readouterr().out == "", "it draws only what has changed"
    live.close()
    left = drawn(said + capsys.readouterr().out)
    assert [line for line in left if line] == ["killed 1", f"long {'y' * 40}"]


def test_lines_that_a_narrower_terminal_has_wrapped_are_erased(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    live = Live(Counting())
    live.show(event("progress", "x" * 50))
    live._console.size = ConsoleDimensions(20, 25)
    capsys.readouterr()
    live.tick()
    said = capsys.readouterr().out
    assert said.count("\x1b[1A") == 1, "its 40 columns were one row and are two"
    assert said.rstrip().endswith(f"progress {'x' * 10}…")
    live.close()


def test_a_terminal_without_rich_gets_the_lines_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    shown = display(Counting(), as_json=False)
    shown.close()
    assert isinstance(shown, Live)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert isinstance(display(Counting(), as_json=False), Plain)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert isinstance(display(Counting(), as_json=False), Plain)


def test_a_log_gets_news_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    report = Counting()
    plain = Plain(report)
    plain.show(event("progress"))
    plain.show(event("killed"))
    report.news_every = 0.0
    plain.show(event("progress", 2))
    assert capsys.readouterr().out.splitlines() == ["killed 1", "progress 2"]


def test_json_tells_progress_at_most_once_a_second(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Json(Counting())
    for _ in range(10):
        shown.show(event("progress"))
        shown.show(event("killed"))
    said = [json.loads(line)["event"] for line in capsys.readouterr().out.splitlines()]
    assert said.count("progress") == 1
    assert said.count("killed") == 10


@pytest.mark.parametrize("shown", [Json, Plain, Live])
def test_what_a_job_prints_and_errors_are_not_on_standard_output(
    shown: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    on = shown(RunReport())
    on.show({"event": "output", "text": "of the job"})
    if shown is not Json:
        on.show({"event": "error", "message": "wrong", "hint": "this"})
    on.close()
    said = capsys.readouterr()
    assert "of the job" not in said.out
    assert "wrong" not in said.out
    assert said.err.startswith("of the job\n")
    assert shown is Json or "error: wrong\n  fix: this\n" in said.err


def test_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert paint("a", "wrong") == "\x1b[31ma\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("a", "wrong") == "a"


def test_columns_line_up() -> None:
    head, rows = ["what", "rows"], [["a", "1"], ["longer", "1,000"]]
    assert table(head, rows) == "what    rows\na       1\nlonger  1,000"
    assert table(head, rows, numbers=True) == "what     rows\na           1\nlonger  1,000"


# ---------------------------------------------------------------- onceflow run


def test_live_lines_fit_and_have_units_however_large_the_numbers() -> None:
    query = {
        "query": "orders.rejected", "epoch": 1_234_567, "rows_in_per_s": 3_456_789.1,
        "rows_out_per_s": 99_999.9, "lag_s": 86_400.0 * 3, "published_s_ago": 7_300.0,
        "watermark": "2026-01-01T00:00:00.123Z", "state_rows": 98_765_432,
    }  # fmt: skip
    heading, line = live_table([query], 140).splitlines()
    assert len(line) <= 120
    assert line.split("  ")[0] == "orders.rejected"
    for cell in ("1,234,567", "3.5M rows/s", "100.0k rows/s", "3 d", "2 h ago", "98.8M rows"):
        assert cell in line
    assert heading.split() == [
        "query", "epoch", "in", "out", "lag", "published", "watermark", "state",
    ]  # fmt: skip


def test_a_run_shows_what_it_does_and_whether_the_driver_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    report = RunReport()
    report.take({"event": "starting", "job": "it.py"})
    now[0] += 3
    assert report.live(80) == "starting it.py … 3 s"
    query = {
        "query": "counts", "epoch": 4, "epochs": 2, "rows_in_per_s": 1.0, "rows_out_per_s": 2.0,
        "lag_s": 0.0, "published_s_ago": None, "watermark": None, "state_rows": None,
    }  # fmt: skip
    report.take({"event": "progress", "queries": [query]})
    assert report.live(80).splitlines()[0].startswith("starting")
    report.take({"event": "started"})
    assert report.live(80) == ""
    report.take({"event": "progress", "queries": [query]})
    assert report.live(80).splitlines()[1].split()[:2] == ["counts", "4"]
    now[0] += 60
    assert report.live(80).splitlines()[2] == "the driver has said nothing for 60 s"
