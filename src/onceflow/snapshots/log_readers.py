"""Who reads a log must not have read what its writer takes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onceflow.contract.ledger import Position
from onceflow.errors import JobError, OnceflowError
from onceflow.log.embedded import EmbeddedLog
from onceflow.log.readers import Reader, readers
from onceflow.log.retention import published_after
from onceflow.log.sink import Log
from onceflow.protocol.home import JobFolder


def refuse_reader_past(
    sink: Log, output: str, cut: Position, job: str, cuts: Mapping[str, Mapping[str, Any]]
) -> None:
    """`JobError` if a query has read rows that `output` published after the cut.

    `cuts`: query -> the end of the cut that it goes back to itself; of the same job.
    """
    first: dict[int, int] = {}
    for segment in published_after(EmbeddedLog(sink.path).refresh(), output, cut):
        first[segment.partition] = min(segment.first, first.get(segment.partition, segment.first))
    for reader in readers(sink.path):
        stands = _stands(reader, job, cuts)
        if any(stands[partition] > offset for partition, offset in first.items()):
            name, _, rest = reader.name.partition("/")
            raise JobError(
                f"{sink}: {reader.name} of {reader.home} has read rows that would be taken back",
                hint=f"let {name} go back first, to before it read them: onceflow rollback {name} "
                f"--home {reader.home} --to …; or choose --published skip; or, if {rest} is not "
                f"needed any more: onceflow log trim {sink.path} --forget {reader.name}",
            )


def _stands(reader: Reader, job: str, cuts: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """The next offset of each partition. What its home does not tell, its own note does."""
    of, query, source = reader.name.split("/", 2)
    try:
        folder = JobFolder(reader.home, of)
        found = [q for q in folder.queries() if q.name == query]
        last = found[0].epoch_log().read().last if found else None
        end = cuts[query] if of == job and query in cuts else last.end if last else {}
        return list(end[source]["next"])
    except (OnceflowError, OSError, KeyError, TypeError):
        return list(reader.needs)
