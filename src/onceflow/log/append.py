"""Append to a log: all rows in one commit, or none of them.

1. name    note the names of the segments in a journal, so that those of a dead producer are removed
2. write   write the segments under unique names; nobody sees them
3. commit  put the commit behind the head; a producer that loses the put checks whether its own put
           took effect after all; if not, it tries again with other offsets for the same segments
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onceflow.errors import Fenced, JobError, OnceflowError, PublishUnknown
from onceflow.folders.commit_log import Commit
from onceflow.log.append_journal import AppendJournal, sweep
from onceflow.log.commits import Offsets
from onceflow.log.segments import fit, split_by_key, write_segment
from onceflow.store.posix import fsync_dir

if TYPE_CHECKING:
    import pyarrow as pa

    from onceflow.log.log_reader import LogReader

SEGMENT_ROWS = 1_000_000


@dataclass(frozen=True)
class Appended:
    """The result of an append: its commit, and the number of rows. `already`: an earlier append of
    this producer had the same sequence and rows.

    `commit` is None if this append made none: there were no rows, or it was done before.
    """

    commit: int | None
    rows: int
    already: bool = False


def append(
    log: LogReader,
    rows: pa.Table | Iterable[pa.Table],
    *,
    producer: str,
    sequence: int | None,
    digest: Callable[[], str] | None,
) -> Appended:
    """See `EmbeddedLog.append`."""
    if bool(producer) != (sequence is not None) or "/" in producer:
        raise JobError(
            f"producer {producer!r} with sequence {sequence}: give both or neither, without '/'",
            hint='append(rows, producer="import", sequence=7)',
        )
    log.refresh()
    done = number = None
    try:
        with AppendJournal(log.path, log.view.position) as appending:
            tried: int | None = None
            written = list(_write(log, rows, appending))
            said = digest() if digest else _digest(written)

            def make() -> Commit | None:
                nonlocal number, tried
                if tried is None:
                    tried = log.view.position
                else:  # others may have rolled up our own commit before we look for it
                    number = _commit_with(log, written, tried, known=bool(producer))
                if number is not None:
                    return None
                ledger = {}
                if producer:
                    assert sequence is not None
                    if _already(log, producer, sequence, said):
                        return None
                    ledger = {"output": producer, "term": 0, "lineage": "", "epoch": sequence,
                              "decision": said}  # fmt: skip
                return {"type": "append", **ledger, **log.commit_of(written)}

            done = log.commit_log.append(make) if written or producer else None
            if done is not None:
                number = int(done["number"])
            if number is not None:
                appending.keep()
    finally:
        if number is None:
            with contextlib.suppress(OnceflowError, OSError):
                sweep(log.path, log)
    count = sum(file["rows"] for file in written)
    return Appended(number, count, already=number is None and bool(producer))


def _commit_with(
    log: LogReader, written: list[dict[str, Any]], since: int, *, known: bool
) -> int | None:
    """The commit above `since` that has these segments.
    `known`: if it is no longer listed, the ledger still has it."""
    paths = {file["path"] for file in written}
    found = log.commit_log.commit_with(paths, since=since)
    if found is not None:
        return int(found["commit"])
    if paths and not known and log.refresh().view.forgotten > since:
        raise PublishUnknown(
            f"{log}: it cannot be known whether the rows were appended: this producer was "
            "paused, and the log was trimmed beyond them meanwhile",
            hint="check the log for the rows; with producer= and sequence= a retry is safe",
        )
    return None


def _write(
    log: LogReader, rows: pa.Table | Iterable[pa.Table], appending: AppendJournal
) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    tables = [rows] if isinstance(rows, pa.Table) else rows
    folders, schema, begun = set(), log.schema, [0] * log.facts.partitions
    for table in tables:
        fitting = fit(table, schema, str(log))
        for at in range(0, fitting.num_rows, SEGMENT_ROWS):
            piece = fitting.slice(at, SEGMENT_ROWS)
            for partition, part in _split(log, piece, begun).items():
                path = appending.name(partition)
                size, crc = write_segment(part, log.path / path)
                folders.add((log.path / path).parent)
                begun[partition] += part.num_rows
                yield {"path": path, "partition": partition, "rows": part.num_rows,
                       "bytes": size, "crc32": crc}  # fmt: skip
    for folder in folders:
        fsync_dir(folder)


def _split(log: LogReader, rows: pa.Table, begun: Offsets) -> dict[int, pa.Table]:
    if log.facts.key:
        return split_by_key(rows, log.facts.key, log.facts.partitions)
    filled = [a + b for a, b in zip(log.view.next, begun, strict=True)]
    return {filled.index(min(filled)): rows}


def _already(log: LogReader, producer: str, sequence: int, digest: str) -> bool:
    ledger = log.view.ledger(producer)
    last = ledger.position.epoch if ledger.position else None
    if last is None or last < sequence:
        return False
    if last == sequence and ledger.decision == digest:
        return True
    what = "with other rows" if last == sequence else f"and is at {last}"
    raise Fenced(
        f"producer {producer!r} has appended sequence {sequence} to {log} before, {what}: "
        "two producers use one name, or the input changed",
        hint="give every producer a name of its own, and every batch a higher sequence",
    )


def _digest(written: list[dict[str, Any]]) -> str:
    facts = sorted((f["crc32"], f["bytes"], f["rows"]) for f in written)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
