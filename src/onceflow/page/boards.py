"""Boards, which applications write for the page, and the runs of `onceflow verify`.

<home>/_boards/<name>.jsonl   a head, then samples and marks
<home>/_verify/<run>/         events.jsonl while it runs, result.json and report.html when it ended
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

from onceflow.errors import JobError
from onceflow.page.files import Lines, Row, parse_lines, read_json
from onceflow.page.times import ago
from onceflow.store.names import NAME, check_name

_SAMPLES = 600
_KEPT = 2 * _SAMPLES
_MARKS = 200
_READ = 4 * 2**20  # bytes of the events of a run, the last ones
_EVENTS = 400  # of a run
_SILENT = 120.0  # seconds; a run that says nothing for so long was killed


def boards(home: str | os.PathLike[str]) -> list[Row]:
    folder = Path(home) / "_boards"
    found = []
    for name in _names(folder):
        if name.endswith(".jsonl") and NAME.fullmatch(name.removesuffix(".jsonl")):
            rows, _ = _lines(folder / name, 64 * 2**10)
            newest = next((row.get("at") for row in reversed(rows) if row.get("at")), None)
            title = _head(folder / name).get("title")
            board = name.removesuffix(".jsonl")
            found.append({"board": board, "title": title or board, "at": newest})
    return found


def board(home: str | os.PathLike[str], name: str) -> Row:
    """The head, the last samples, thinned, and the marks; `JobError` if there is none."""
    return FollowedBoard(home, name).read()


class FollowedBoard:
    """One board; a line of it is read once."""

    def __init__(self, home: str | os.PathLike[str], name: str) -> None:
        self._name = check_name("board", name)
        self._path = Path(home) / "_boards" / f"{name}.jsonl"
        self._samples: deque[Row] = deque(maxlen=_KEPT)
        self._marks: deque[Row] = deque(maxlen=_MARKS)
        self._head: Row = {}
        self._last: Row | None = None
        self._lines = Lines(self._path, self._take, self._restart)

    def read(self) -> Row:
        if not self._path.is_file():
            raise JobError(
                f"there is no board {self._name}", hint="an application that runs writes one"
            )
        self._lines.read()
        if not self._head:
            self._head = _head(self._path)
        return {
            **self._head,
            "board": self._name,
            "samples": thinned(list(self._samples), _SAMPLES),
            "marks": list(self._marks),
            "last": self._last,
        }

    def _take(self, row: Row) -> None:
        if isinstance(row.get("mark"), str):
            self._marks.append(row)
        elif isinstance(row.get("totals"), dict):
            self._last = row
            self._samples.append(
                {k: v for k, v in row.items() if k != "campaigns"}
            )  # they are large

    def _restart(self) -> None:
        self._samples.clear()
        self._marks.clear()
        self._head, self._last = {}, None


def thinned(rows: list[Row], keep: int) -> list[Row]:
    """At most so many, evenly, with the first and the last."""
    if len(rows) <= keep:
        return rows
    step = (len(rows) - 1) / (keep - 1)
    return [rows[round(i * step)] for i in range(keep)]


def _head(path: Path) -> Row:
    first = _first(path)
    return first if "board" in first else {}


def _lines(path: Path, most: int) -> tuple[list[Row], int]:
    """The objects in the last bytes of a file, and how large it is."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read(most)
    except OSError:
        return [], 0
    lines = data.split(b"\n")
    return list(parse_lines(lines if size <= most else lines[1:])), size


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


# ---------------------------------------------------------------- runs of verify


def verify_runs(home: str | os.PathLike[str]) -> list[Row]:
    """The newest first."""
    root = Path(home) / "_verify"
    runs = [_run(root / name) for name in _names(root) if NAME.fullmatch(name)]
    known = [run for run in runs if run["began"] is not None or run["verdict"] is not None]
    return sorted(known, key=lambda run: str(run["began"]), reverse=True)


def verify_run(home: str | os.PathLike[str], run: str) -> Row:
    """One run with its events and, when it has ended, its result; `JobError` if there is none."""
    folder = Path(home) / "_verify" / check_name("run", run)
    if not folder.is_dir():
        raise JobError(f"there is no run {run}", hint="onceflow verify makes one")
    events, _ = _lines(folder / "events.jsonl", _READ)
    kept = [e for e in events if e.get("event") != "progress"][-_EVENTS:]
    return {**_run(folder), "events": kept, "result": read_json(folder / "result.json")}


def _run(folder: Path) -> Row:
    events, size = _lines(folder / "events.jsonl", 256 * 2**10)
    result: dict[str, Any] | None = read_json(folder / "result.json")
    first = _first(folder / "events.jsonl")
    last = events[-1] if events else {}
    quiet = ago(last.get("at"))
    state = "ended" if result else "running" if quiet is not None and quiet < _SILENT else "broken"
    progress = next((e for e in reversed(events) if e.get("event") == "progress"), None)
    return {
        "run": folder.name,
        "state": state,
        "says": {
            "ended": "it has ended", "running": "it runs", "broken": "it ended without a result",
        }[state],
        "began": (result or {}).get("began") or first.get("at"),
        "seconds": (result or {}).get("seconds"),
        "verdict": (result or {}).get("verdict"),
        "seed": (result or {}).get("seed"),
        "command": (result or {}).get("command") or first.get("command"),
        "struck": (result or {}).get("struck"),
        "violations": None if result is None else len(result.get("violations") or ()),
        "progress": None if result else progress,
        "report": (folder / "report.html").is_file(),
        "events_bytes": size,
    }  # fmt: skip


def _first(path: Path) -> Row:
    try:
        with open(path, "rb") as file:
            return next(iter(parse_lines([file.readline(2**16)])), {})
    except OSError:
        return {}
