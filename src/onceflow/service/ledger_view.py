"""The ledger of each target, compared with the last decision in the epoch log."""

from __future__ import annotations

from typing import Any, TypedDict

from onceflow.contract.ledger import Guarantee
from onceflow.contract.registry import open_target
from onceflow.errors import OnceflowError
from onceflow.protocol.home import JobFolder, Query


class LedgerRow(TypedDict):
    """The ledger of one output. `says`: the comparison in words, or why the target was not read."""

    query: str
    output: str | None
    decided: int | None
    published: int | None
    term: int | None
    lineage: str | None
    guarantee: str | None
    target: str | None
    says: str


def ledger(folder: JobFolder) -> list[LedgerRow]:
    found: list[LedgerRow] = []
    for query in folder.queries():
        log = query.epoch_log().read()
        decided = log.last.epoch if log.last else None
        outputs = (log.leader or {}).get("outputs") or {}
        found += [ledger_of(query, name, target, decided) for name, target in outputs.items()]
    return found


def ledger_of(query: Query, output: str, target: dict[str, Any], decided: int | None) -> LedgerRow:
    row: LedgerRow = {
        "query": query.name, "output": output, "decided": decided, "published": None,
        "term": None, "lineage": None, "guarantee": target.get("guarantee"),
        "target": str(target.get("kind")), "says": "",
    }  # fmt: skip
    try:
        sink = open_target(target)
        said = sink.published(f"{query.job}/{query.name}/{output}")
    except OnceflowError as error:
        row["says"] = error.message
        return row
    row["target"], row["term"] = str(sink), said.term
    if said.position is not None:
        row["lineage"], row["published"] = said.position.lineage, said.position.epoch
    exact = row["guarantee"] == Guarantee.EXACTLY_ONCE
    row["says"] = _compare(decided, row["published"]) if exact else "keeps no ledger, by choice"
    return row


def _compare(decided: int | None, published: int | None) -> str:
    if decided == published:
        return "all that is decided is published"
    if published is None or (decided is not None and published < decided):
        return "behind: the next start publishes the rest, or says why it cannot"
    return "ahead of the epoch log: this home was set back, or is a copy"
