"""`onceflow log`: create, info and trim. `rows` has append and tail."""

from __future__ import annotations

import time
from typing import Any

import click

from onceflow.cli.display import json_option, show, table
from onceflow.cli.log_input import append, parse_time, place, tail
from onceflow.contract.quantities import milliseconds, parse_bytes
from onceflow.contract.schema import columns
from onceflow.errors import JobError
from onceflow.log.embedded import DEFAULT_SCHEMA, EmbeddedLog
from onceflow.log.readers import Reader, forget, readers
from onceflow.log.retention import expired, trim
from onceflow.log.text_output import show_time
from onceflow.service.units import age, number


@click.group("log")
def command() -> None:
    """The embedded log: a folder that is a durable, partitioned log, without a server.

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
    help="How many partitions, 1 to 1024.",
)
@click.option(
    "--key",
    metavar="COLUMN",
    multiple=True,
    help="Rows with the same key are in one partition. May be given more than once.",
)
@click.option("--retain", metavar="TIME", help='Older rows go by themselves, such as "7 days".')
@click.option("--retain-bytes", metavar="SIZE", help='Only about so much is kept, such as "10 GB".')
@json_option
def create(  # noqa: PLR0917 - one parameter for each option
    path: str, schema: str, partitions: int, key: tuple[str, ...], retain: str | None,
    retain_bytes: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Create a log. Its columns, partitions and key cannot be changed later.

    What is retained is looked at when rows are appended; rows that a job still needs stay.

    \b
    onceflow log create events --schema "user string, at timestamp" --key user --partitions 4
    """
    log = EmbeddedLog.create(
        path, schema, partitions=partitions, key=key,
        retain_ms=None if retain is None else milliseconds(retain),
        retain_bytes=None if retain_bytes is None else parse_bytes(retain_bytes),
    )  # fmt: skip
    show(_facts(log), as_json=as_json, text=_created)


def _facts(log: EmbeddedLog) -> dict[str, Any]:
    facts = log.facts
    return {
        "log": str(log.path), "id": facts.id, "columns": columns(facts.schema),
        "key": list(facts.key), "partitions": facts.partitions, "retain_ms": facts.retain_ms,
        "retain_bytes": facts.retain_bytes,
    }  # fmt: skip


def _created(facts: dict[str, Any]) -> str:
    return f"created {facts['log']}: {number(facts['partitions'], 'partitions')}, {_columns(facts)}"


def _columns(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in facts["columns"].items())


# ---------------------------------------------------------------- info


@command.command("info")
@click.argument("path")
@json_option
def info(path: str, as_json: bool) -> None:
    """What is in a log, who wrote it, and who still needs which rows.

    \b
    onceflow log info events
    """
    show(describe(EmbeddedLog(path)), as_json=as_json, text=_described)


def describe(log: EmbeddedLog) -> dict[str, Any]:
    view = log.view
    parts = [
        {"partition": p, "earliest": view.low[p], "next": view.next[p], "rows": view.rows(p)}
        for p in range(log.facts.partitions)
    ]
    return {
        **_facts(log),
        "partitions": parts,
        "rows": sum(part["rows"] for part in parts),
        "bytes": view.bytes - view.removed,
        "commits": view.position,
        "created": _time(view.created_at),
        "last_append": _time(view.appended_at),
        "producers": [_producer(log, name) for name in sorted(view.ledgers)],
        "readers": [_reader(log, reader) for reader in readers(log.path)],
    }


def _producer(log: EmbeddedLog, name: str) -> dict[str, Any]:
    """A job's output has a name with slashes, a term, a lineage and epochs; others a sequence."""
    said = log.view.ledger(name)
    at = said.position
    if "/" in name:
        return {
            "name": name, "term": said.term, "lineage": at.lineage if at else None,
            "epoch": at.epoch if at else None,
        }  # fmt: skip
    return {"name": name, "sequence": at.epoch if at else None}


def _reader(log: EmbeddedLog, reader: Reader) -> dict[str, Any]:
    held = [
        log.view.next[p] - max(needs, log.view.low[p])
        for p, needs in enumerate(reader.needs[: log.facts.partitions])
    ]
    return {
        "name": reader.name, "home": reader.home, "lineage": reader.lineage,
        "needs": reader.needs, "holds_rows": sum(max(0, rows) for rows in held), "at": reader.at,
    }  # fmt: skip


def _time(microseconds: int) -> str | None:
    return show_time(microseconds, digits="milliseconds") if microseconds else None


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
@click.option("--before", metavar="TIME", help="Rows that were appended before this time.")
@click.option(
    "--below",
    metavar="OFFSETS",
    help="Rows below P:OFFSET[,P:OFFSET]; OFFSET alone if there is one partition.",
)
@click.option("--keep-bytes", metavar="SIZE", help='All but the newest, such as "10 GB".')
@click.option("--older-than", metavar="TIME", help='Rows of that age, such as "7 days".')
@click.option(
    "--forget",
    "reader",
    metavar="READER",
    help="No rows, but a reader that is gone for good: a job, or job/query/source.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be taken, and take nothing.")
@json_option
def trim_command(  # noqa: PLR0917 - one parameter for each option
    path: str, before: str | None, below: str | None, keep_bytes: str | None,
    older_than: str | None, reader: str | None, dry_run: bool, as_json: bool,
) -> None:  # fmt: skip
    """Take the oldest rows away, for good. Refused if a reader still needs one of them.

    Whole commits go, but for --below, which is exact. Say one of the five.

    \b
    onceflow log trim events --older-than "30 days" --dry-run
    """
    if sum(value is not None for value in (before, below, keep_bytes, older_than, reader)) != 1:
        raise JobError(
            "what is to be trimmed is not clear",
            hint="say one of --before, --below, --keep-bytes, --older-than and --forget",
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
        raise JobError(f"{before} is in the future", hint="name a past time")
    return at


def _trimmed(took: dict[str, Any]) -> str:
    verb = "would take" if took["dry_run"] else "took"
    left = ", ".join(f"{p}:{offset:,}" for p, offset in enumerate(took["earliest"]))
    size = f"{number(took['files'], 'files')}, {number(took['bytes'], 'bytes')}"
    return f"{verb} {number(took['rows'], 'rows')} ({size}); the earliest offsets are {left}"
