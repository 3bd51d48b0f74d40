"""`onceflow ledger`"""

from __future__ import annotations

from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show, table
from onceflow.protocol.home import select_jobs
from onceflow.service.ledger_view import ledger


@click.command("ledger")
@click.argument("job")
@home_option
@json_option
def command(job: str, home: str, as_json: bool) -> None:
    """Show what each target says is published.

    Beside it is the last epoch that the epoch log has decided. "behind": the next start publishes
    the rest. "ahead of the epoch log": the home was set back, or is a copy.

    With --json: a list with an object for each output: query, output, decided and published
    (epochs, or null), term, lineage, guarantee, target, says.

    \b
    onceflow ledger word-count
    """
    show(ledger(select_jobs(home, job)[0]), as_json=as_json, text=_text)


def _text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no query has started"
    head = ["output", "guarantee", "decided", "published", "term", "target"]
    body = [
        [
            _name(row),
            row["guarantee"] or "-",
            _epoch(row["decided"]),
            _epoch(row["published"]),
            "-" if row["term"] is None else str(row["term"]),
            row["target"],
        ]
        for row in rows
    ]
    return "\n".join([table(head, body), *(f"{_name(row)}: {row['says']}" for row in rows)])


def _name(row: dict[str, Any]) -> str:
    output, query = str(row["output"]), row["query"]
    return output if output == query else f"{query}.{output}"


def _epoch(number: int | None) -> str:
    return "nothing" if number is None else f"epoch {number:,}"
