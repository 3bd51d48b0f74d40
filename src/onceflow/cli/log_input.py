"""`onceflow log append` and `onceflow log tail`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.display import ProgressLine, json_option, show, write_nowhere
from onceflow.contract.schema import parse_schema, spark_schema
from onceflow.errors import BadInput, DiskFull, JobError
from onceflow.log.embedded import DEFAULT_SCHEMA, EmbeddedLog
from onceflow.log.row_input import FORMATS, Input, RejectFile, RowInput, parquet_file
from onceflow.log.row_output import as_word, plain_rows
from onceflow.log.segments import APPENDED_AT, OFFSET, OURS, PARTITION
from onceflow.log.strict_values import Malformed, microseconds
from onceflow.log.tail import last_slices, slices_from
from onceflow.service.number_format import number

if TYPE_CHECKING:
    import pyarrow as pa

    from onceflow.log.commits import Offsets
    from onceflow.log.segments import Slice

_LOOK_EVERY = 0.2  # seconds
_AT_ONCE = 1000  # rows that are written at once


# ---------------------------------------------------------------- append


@click.command("append")
@click.argument("path")
@click.argument("files", metavar="[FILE]...", nargs=-1)
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="The format of the input; by default the ending of each file says it, and standard input "
    "is JSON.",
)
@click.option(
    "--reject",
    metavar="FILE",
    help="Write lines that do not fit to this new file, and append the others.",
)
@click.option(
    "--producer", metavar="NAME", help="A name for the program that appends; with --sequence."
)
@click.option(
    "--sequence",
    metavar="N",
    type=click.IntRange(min=0),
    help="A number that grows with each append. The same append given again adds nothing; other "
    "rows under the same number are refused.",
)
@json_option
def append(  # noqa: PLR0917 - one parameter for each option
    path: str, files: tuple[str, ...], format_: str | None, reject: str | None,
    producer: str | None, sequence: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Append rows to a log, all of them or none, in one commit.

    They come from files, or from standard input (-). JSON is one object a line. CSV begins with a
    line of column names. With text, each line is a "value". If a line does not fit, nothing is
    appended, and the first twenty such lines are listed; see --reject. docs/log.md says which
    values fit which type.

    If there is no log at PATH, it is created: with the columns of a Parquet file, else with
    "value string, event_time timestamp".

    With --json: one object with log, rows, commit (null if there was nothing to append), already,
    created, rejected, reject. Exit codes: 0; 6 --producer has appended other rows under this
    --sequence; 9 a line does not fit.

    \b
    onceflow log append events monday.json tuesday.csv
    journalctl -u shop -o cat | onceflow log append events --format text
    """
    if (producer is None) != (sequence is None):
        raise JobError("--producer and --sequence belong together", hint="give both, or neither")
    inputs = [Input.of(name, format_) for name in files or ("-",)]
    if [source.path for source in inputs].count("-") > 1:
        raise JobError("standard input is given twice", hint="give - once")
    log = None if _is_free(path) else EmbeddedLog(path)
    schema = log.facts.schema if log else _schema_of(inputs)
    rejects = None if reject is None else RejectFile(Path(reject))
    progress = ProgressLine("{:,} rows read", quiet=as_json or not sys.stderr.isatty())
    intake = RowInput(inputs, schema, now=time.time_ns() // 1000, rejects=rejects,
                    progress=progress)  # fmt: skip
    if not files and sys.stdin.isatty():
        click.echo("reading lines from the terminal; Ctrl-D ends them", err=True)
    created, done = log is None, None
    try:
        with contextlib.closing(intake.tables()) as tables:
            rows = tables if log else _first_of(tables, path)
            if log is None and rows is not None:
                log = EmbeddedLog.create(path, schema, exist_ok=True)
            if log is not None and rows is not None:
                done = log.append(
                    rows, producer=producer or "", sequence=sequence, digest=intake.digest
                )
    except DiskFull as error:
        raise DiskFull(error.message, hint="free some space and append again") from error
    finally:
        progress.clear()
    answer = {
        "log": os.path.abspath(path), "rows": done.rows if done else 0,
        "commit": done.commit if done else None, "already": bool(done and done.already),
        "created": created and done is not None, "rejected": intake.bad,
        "reject": reject if intake.bad else None,
    }  # fmt: skip
    show(answer, as_json=as_json, text=_appended)


def _is_free(path: str) -> bool:
    """May a log be created there?"""
    folder = os.path.abspath(path)
    return not os.path.lexists(folder) or (os.path.isdir(folder) and not os.listdir(folder))


def _schema_of(inputs: Iterable[Input]) -> str:
    for source in inputs:
        if source.format == "parquet":
            with parquet_file(source.path) as file:
                return spark_schema(file.schema_arrow)
    return parse_schema(DEFAULT_SCHEMA)


def _first_of(tables: Iterator[pa.Table], path: str) -> Iterator[pa.Table] | None:
    """The tables, if there are any: no log is created for nothing, or for rows that do not fit."""
    try:
        first = next(tables, None)
    except BadInput as error:
        raise BadInput(
            error.message,
            hint=f"{error.hint}; there is no log at {path} yet, so its columns would be "
            f"{DEFAULT_SCHEMA}: for others, create it first: "
            f'onceflow log create {path} --schema "name type, …"',
        ) from error
    return None if first is None else itertools.chain([first], tables)


def _appended(done: dict[str, Any]) -> str:
    if done["already"]:
        text = f"{done['log']} has these {number(done['rows'], 'rows')} already"
    elif done["commit"] is None:
        text = "there was nothing to append"
    else:
        to = f"{done['log']}{', which is new' if done['created'] else ''}"
        text = f"appended {number(done['rows'], 'rows')} to {to} (commit {done['commit']:,})"
    if done["rejected"]:
        text += f"\n{number(done['rejected'], 'lines')} did not fit, and are in {done['reject']}"
    return text


# ---------------------------------------------------------------- places in a log


def parse_time(text: str) -> int:
    """Microseconds since 1970."""
    try:
        return microseconds(text)
    except Malformed as error:
        raise JobError(str(error), hint="write it as 2026-11-15T10:00:00Z") from None


def place(log: EmbeddedLog, text: str, partition: int | None = None) -> Offsets:
    """P:OFFSET[,P:OFFSET], or OFFSET if only one partition can be meant; the others stay."""
    if re.fullmatch(r"[0-9]+", text):
        if partition is None and log.facts.partitions > 1:
            raise JobError(
                f"offset {text} needs a partition: {log} has {log.facts.partitions}",
                hint=f"write it as 0:{text}",
            )
        text = f"{partition or 0}:{text}"
    if not re.fullmatch(r"[0-9]+:[0-9]+(,[0-9]+:[0-9]+)*", text):
        raise JobError(f"{text!r} is not a place in a log", hint="write it as 0:1200,1:1300")
    offsets = list(log.view.low)
    for pair in text.split(","):
        p, offset = map(int, pair.split(":"))
        refuse_partition(log, p)
        offsets[p] = offset
    return offsets


def refuse_partition(log: EmbeddedLog, partition: int) -> None:
    if partition >= log.facts.partitions:
        raise JobError(
            f"{log} has no partition {partition}",
            hint=f"it has 0 to {log.facts.partitions - 1}",
        )


# ---------------------------------------------------------------- tail


@click.command("tail")
@click.argument("path")
@click.option(
    "-n",
    "--rows",
    "count",
    metavar="N",
    type=click.IntRange(min=0),
    help="The number of rows; 10 by default, with --from all.",
)
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Wait for more rows, until Ctrl-C or until nobody reads the output.",
)
@click.option("--partition", metavar="P", type=click.IntRange(min=0), help="Only this partition.")
@click.option(
    "--columns",
    metavar="NAMES",
    help="Only these columns: a,b,c; _partition, _offset and _appended_at are columns too.",
)
@click.option(
    "--from",
    "start",
    metavar="PLACE",
    help="Start there: OFFSET, P:OFFSET[,P:OFFSET] (other partitions at their earliest), or the "
    "time of an append.",
)
@json_option
def tail(  # noqa: PLR0917 - one parameter for each option
    path: str, count: int | None, follow: bool, partition: int | None, columns: str | None,
    start: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Show the newest rows of a log, and with -f those that follow.

    Rows are in the order of their commits: partition:offset, time of append, and the columns.
    Only the newest commits are read.

    With --json: one object a line, which onceflow log append takes: times as ISO 8601, decimals as
    strings, binary as base64.

    \b
    onceflow log tail events -f
    onceflow log tail events --from 2026-11-15T10:00:00Z --columns value --json
    """
    log = EmbeddedLog(path)
    if partition is not None:
        refuse_partition(log, partition)
    names = log.columns(None if columns is None else [c.strip() for c in columns.split(",")])
    writer = _Writer(log, names, as_json)
    if start is None:
        parts, left = last_slices(log, 10 if count is None else count, partition), None
    else:
        parts, left = slices_from(log, _start(log, start, partition), partition), count
    reached = list(log.view.next)
    try:
        with _noting_interrupts() as interrupted:
            left = writer.write(parts, left)
            while follow and left != 0 and _somebody_reads(_LOOK_EVERY):
                if interrupted.is_set():
                    break
                parts = slices_from(log.refresh(), reached, partition)
                reached = list(log.view.next)
                left = writer.write(parts, left)
    except KeyboardInterrupt:
        if not follow:
            raise
    except BrokenPipeError:
        write_nowhere()


@contextlib.contextmanager
def _noting_interrupts() -> Iterator[threading.Event]:
    """Ctrl-C raises as always and is noted, since Python drops what is raised in a finaliser."""
    noted = threading.Event()

    def interrupt(*_: object) -> None:
        noted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _start(log: EmbeddedLog, text: str, partition: int | None) -> Offsets:
    if re.fullmatch(r"[0-9]+|[0-9]+:[0-9]+(,[0-9]+:[0-9]+)*", text):
        offsets = place(log, text, partition)
        log.refuse_range(offsets, [max(p) for p in zip(offsets, log.view.next, strict=True)])
        return offsets
    return log.offsets_at(parse_time(text))


class _Writer:
    """Rows on standard output, as text or as JSON, many at once."""

    def __init__(self, log: EmbeddedLog, names: list[str], as_json: bool) -> None:
        fields = json.loads(log.facts.schema)["fields"]
        self._kinds = {**{field["name"]: field["type"] for field in fields}, **OURS}
        self._log = log
        own = [name for name in names if name not in OURS]
        self._names = names if as_json else [PARTITION, OFFSET, APPENDED_AT, *own]
        self._line: Callable[[dict[str, Any]], str] = _json_line if as_json else _text_line

    def write(self, parts: Iterable[Slice], left: int | None) -> int | None:
        """At most `left` rows. Returns how many may still come; None for any number."""
        for part in parts:
            for batch in self._log.read_slices([part], self._names):
                for at in range(0, batch.num_rows, _AT_ONCE):
                    if left == 0:
                        return 0
                    some = batch.slice(at, _AT_ONCE if left is None else min(_AT_ONCE, left))
                    lines = [self._line(row) for row in plain_rows(some, self._kinds)]
                    click.echo("\n".join(lines).encode())
                    left = None if left is None else left - some.num_rows
            if left == 0:
                return 0
        return left


def _json_line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False)


def _text_line(row: dict[str, Any]) -> str:
    at = f"{row.pop(PARTITION)}:{row.pop(OFFSET)}"
    words = [at, row.pop(APPENDED_AT), *(f"{name}={as_word(value)}" for name, value in row.items())]
    return "  ".join(words)


def _somebody_reads(seconds: float) -> bool:
    """Wait. False if the reader of our output has gone, which only the next write would show."""
    try:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # no file behind it
        time.sleep(seconds)
        return True
    events = output.poll(seconds * 1000)
    if any(event & (select.POLLERR | select.POLLHUP) for _, event in events):
        return False
    if events:
        time.sleep(seconds)
    return True
