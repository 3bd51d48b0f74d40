"""`onceflow ledger`"""

from __future__ import annotations

from typing import Any

import click

from onceflow.cli.output import home_option, json_option, show, table
from onceflow.cli.status import known
from onceflow.errors import JobError, OnceflowError
from onceflow.home import JobFolder, jobs
from onceflow.sinks import open_target


@click.command("ledger")
@click.argument("job")
@home_option
@json_option
def command(job: str, home: str, as_json: bool) -> None:
    """What each target itself says is published, beside what the epoch log decided."""
    folder = next((folder for folder in jobs(home) if folder.name == job), None)
    if folder is None:
        raise JobError(f"no job {job} ran under {home}", hint=known(home))
    show(ledger(folder), as_json=as_json, text=_text)


def ledger(folder: JobFolder) -> list[dict[str, Any]]:
    found = []
    for query in folder.queries():
        log = query.epoch_log().read()
        decided = log.last.epoch if log.last else None
        for output, target in ((log.leader or {}).get("outputs") or {}).items():
            row: dict[str, Any] = {
                "query": query.name, "output": output, "decided": decided, "published": None,
                "term": None, "lineage": None, "guarantee": target.get("guarantee"),
                "target": str(target.get("kind")), "says": "",
            }  # fmt: skip
            settings = {key: value for key, value in target.items() if key != "guarantee"}
            try:
                sink = open_target(settings)
                if sink is None:
                    row["says"] = "a sink that this command cannot open"
                else:
                    said = sink.published(f"{query.job}/{query.name}/{output}")
                    row.update(target=str(sink), term=said.term)
                    if said.position is not None:
                        row.update(lineage=said.position.lineage, published=said.position.epoch)
                    row["says"] = _compare(decided, row["published"])
            except OnceflowError as error:
                row["says"] = error.message
            found.append(row)
    return found


def _compare(decided: int | None, published: int | None) -> str:
    if decided == published:
        return "all that is decided is published"
    if published is None or (decided is not None and published < decided):
        return "behind: the next start publishes the rest, or says why it can't"
    return "ahead of the epoch log: this home was set back, or is a copy"


def _text(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "no query has started"
    head = ["output", "target", "guarantee", "decided", "published", "term", "what it means"]
    body = [
        [
            row["output"] if row["output"] == row["query"] else f"{row['query']}.{row['output']}",
            row["target"],
            row["guarantee"] or "-",
            *("-" if row[k] is None else str(row[k]) for k in ("decided", "published", "term")),
            row["says"],
        ]
        for row in rows
    ]
    return table(head, body)
