"""`onceflow log`: create, info and trim. `log_input` has append and tail."""

from __future__ import annotations

import time
from typing import Any

import click

from onceflow.cli.display import json_option, show, table
from onceflow.cli.log_input import append, parse_time, place, tail
from onceflow.contract.quantities import milliseconds, parse_bytes
from onceflow.errors import JobError
from onceflow.log.description import describe, facts_of
from onceflow.log.embedded import DEFAULT_SCHEMA, EmbeddedLog
from onceflow.log.reader_positions import forget
from onceflow.log.retention import expired, trim
from onceflow.service.number_format import age, number


@click.group("log")
def command() -> None:
    """Create, fill, read and trim logs, which need no server.

    A log is a folder: durable, partitioned, with offsets that never change. Any number of these
    commands and of jobs may work on one log at once; readers see whole commits only. docs/log.md
    describes formats and types.

    \b
    onceflow log create events --partitions 4
    onceflow log append events rows.json
    onceflow log tail events -f
    """


command.add_command(append)
command.add_command(tail)


# ---------------------------------------------------------------- create


@command.command("create")
@click.argument("path")
@click.option(
    "--schema",
    metavar="COLUMNS",
    default=DEFAULT_SCHEMA,
    show_default=True,
    help='Names and types, such as "id long, at timestamp, tags array<string>".',
)
@click.option(
    "--partitions",
    metavar="N",
    type=int,
    default=1,
    show_default=True,
    help="The number of partitions, 1 to 1024.",
)
@click.option(
    "--key",
    metavar="COLUMN",
    multiple=True,
    help="Rows with the same key are in one partition, in their order; may be given several times.",
)
@click.option("--retain", metavar="TIME", help='Remove older rows, such as "7 days".')
@click.option(
    "--retain-bytes", metavar="SIZE", help='Remove old rows above this size, such as "10 GB".'
)
@json_option
def create(  # noqa: PLR0917 - one parameter for each option
    path: str, schema: str, partitions: int, key: tuple[str, ...], retain: str | None,
    retain_bytes: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Create a log. Its columns, partitions and key cannot be changed later.

    Rows that are no longer retained are removed now and then when rows are appended; rows that a
    job still needs stay.

    With --json: one object with log, id, columns, key, partitions, retain_ms, retain_bytes.

    \b
    onceflow log create events --schema "user string, at timestamp" --key user --partitions 4
    """
    log = EmbeddedLog.create(
        path, schema, partitions=partitions, key=key,
        retain_ms=None if retain is None else milliseconds(retain),
        retain_bytes=None if retain_bytes is None else parse_bytes(retain_bytes),
    )  # fmt: skip
    show(facts_of(log), as_json=as_json, text=_created)


def _created(facts: dict[str, Any]) -> str:
    return f"created {facts['log']}: {number(facts['partitions'], 'partitions')}, {_columns(facts)}"


def _columns(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in facts["columns"].items())


# ---------------------------------------------------------------- info


@command.command("info")
@click.argument("path")
@json_option
def info(path: str, as_json: bool) -> None:
    """Show the size, the producers and the readers of a log.

    The rows that its readers still need stay in the log.

    With --json: as of create, and rows, bytes, commits, created, last_append, and for each
    partition its earliest offset, next (the offset that the next row gets) and rows. producers:
    name and sequence, or for an output of a job (job/query/output) term, lineage and epoch.
    readers: a source of a job (job/query/source) with home, lineage, needs (the offsets from which
    its rows stay), holds_rows and at.

    \b
    onceflow log info events
    """
    show(describe(EmbeddedLog(path)), as_json=as_json, text=_described)


def _described(facts: dict[str, Any]) -> str:
    kept = [] if facts["retain_ms"] is None else [age(facts["retain_ms"] / 1000)]
    kept += [] if facts["retain_bytes"] is None else [number(facts["retain_bytes"], "bytes")]
    lines = [
        ["columns", _columns(facts)],
        ["key", ", ".join(facts["key"]) or "-"],
        ["retains", " and ".join(kept) or "everything"],
        ["rows", f"{number(facts['rows'], 'rows')}, {number(facts['bytes'], 'bytes')}"],
        ["commits", number(facts["commits"], "commits")],
        ["created", facts["created"] or "-"],
        ["last append", facts["last_append"] or "-"],
    ]
    blocks = [f"{facts['log']}\n" + table(["id", facts["id"]], lines)]
    parts = [
        [str(part["partition"]), f"{part['earliest']:,}", f"{part['next']:,}",
         number(part["rows"], "rows")]
        for part in facts["partitions"]
    ]  # fmt: skip
    blocks.append(table(["partition", "earliest", "next", "rows"], parts))
    if facts["producers"]:
        rows = [[one["name"], _stands(one)] for one in facts["producers"]]
        blocks.append(table(["producer", "stands at"], rows))
    if facts["readers"]:
        rows = [
            [one["name"], one["home"], ", ".join(f"{n:,}" for n in one["needs"]),
             number(one["holds_rows"], "rows"), one["at"]]
            for one in facts["readers"]
        ]  # fmt: skip
        blocks.append(table(["reader", "home", "needs from", "holds", "as of"], rows))
    return "\n\n".join(blocks)


def _stands(producer: dict[str, Any]) -> str:
    if "sequence" in producer:
        return f"sequence {producer['sequence']:,}"
    if producer["epoch"] is None:
        return f"nothing yet, term {producer['term']}"
    return f"epoch {producer['epoch']:,} of {producer['lineage'][:8]}, term {producer['term']}"


# ---------------------------------------------------------------- trim


@command.command("trim")
@click.argument("path")
@click.option("--before", metavar="TIME", help="Remove rows that were appended before this time.")
@click.option(
    "--below",
    metavar="OFFSETS",
    help="Remove rows below P:OFFSET[,P:OFFSET]; OFFSET alone if there is one partition.",
)
@click.option("--keep-bytes", metavar="SIZE", help='Remove all but the newest, such as "10 GB".')
@click.option("--older-than", metavar="TIME", help='Remove rows of that age, such as "7 days".')
@click.option(
    "--forget",
    "reader",
    metavar="READER",
    help="Remove no rows, but a reader that will not return: a job, or job/query/source.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@json_option
def trim_command(  # noqa: PLR0917 - one parameter for each option
    path: str, before: str | None, below: str | None, keep_bytes: str | None,
    older_than: str | None, reader: str | None, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Remove the oldest rows of a log, for good. Refused if a reader still needs one of them.

    Whole commits are removed, except with --below. Give one of the first five options.

    With --json: one object with log, rows, bytes, files, earliest (the offset of each partition),
    dry_run; with --forget: log, forgot, dry_run. Exit codes: 0; 2 a reader, which is named, still
    needs the rows.

    \b
    onceflow log trim events --older-than "30 days" --dry-run
    """
    if sum(value is not None for value in (before, below, keep_bytes, older_than, reader)) != 1:
        raise JobError(
            "trim needs exactly one of its first five options",
            hint="give one of --before, --below, --keep-bytes, --older-than and --forget",
        )
    log = EmbeddedLog(path)
    if reader is not None:
        gone = forget(log.path, reader, dry_run=dry_run)
        names = [f"{one.name} (home {one.home})" for one in gone]
        answer = {"log": str(log.path), "forgot": [one.name for one in gone], "dry_run": dry_run}
        verb = "would forget" if dry_run else "forgot"
        show(answer, as_json=as_json, text=lambda _: f"{verb} {', '.join(names)}")
        return
    if below is not None:
        offsets = place(log, below)
    else:
        keep = None if keep_bytes is None else parse_bytes(keep_bytes)
        offsets = expired(log, before=_limit(before, older_than), keep_bytes=keep)
    took = trim(log, offsets, dry_run=dry_run)
    answer = {
        "log": str(log.path), "rows": took.rows, "bytes": took.bytes, "files": took.files,
        "earliest": took.low, "dry_run": dry_run,
    }  # fmt: skip
    show(answer, as_json=as_json, text=_trimmed)


def _limit(before: str | None, older_than: str | None) -> int | None:
    """The time before which rows go, in microseconds since 1970."""
    now = time.time_ns() // 1000
    if older_than is not None:
        return now - milliseconds(older_than) * 1000
    if before is None:
        return None
    at = parse_time(before)
    if at > now:
        raise JobError(f"{before} is in the future", hint="give a time in the past")
    return at


def _trimmed(took: dict[str, Any]) -> str:
    verb = "would remove" if took["dry_run"] else "removed"
    left = ", ".join(f"{p}:{offset:,}" for p, offset in enumerate(took["earliest"]))
    size = f"{number(took['files'], 'files')}, {number(took['bytes'], 'bytes')}"
    return f"{verb} {number(took['rows'], 'rows')} ({size}); the earliest offsets are {left}"
