"""`onceflow lineages`"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show
from onceflow.protocol.home import select_jobs
from onceflow.snapshots.lineages import describe_lineages

Facts = dict[str, Any]


@click.command("lineages")
@click.argument("job")
@home_option
@json_option
def command(job: str, home: str, as_json: bool) -> None:
    """Show the lineages of a job as a tree.

    Each restore, rollback or fork opens one, which continues from a cut of its parent. For each:
    why, when and by whom it was opened, its code, the epochs that were decided in it, and its
    savepoints.

    With --json: a list with an object for each lineage, from the first to the current one:
    lineage, parent, from (query to epoch), reason, at, who, code, spark, queries (first and last
    epoch of each, or null), ended, current, savepoints.

    \b
    onceflow lineages word-count
    """
    show(
        describe_lineages(select_jobs(home, job)[0]),
        as_json=as_json,
        text=lambda found: _text(job, found),
    )


def _text(job: str, found: list[Facts]) -> str:
    if not found:
        return f"{job} has not started yet"
    known = {facts["lineage"] for facts in found}
    roots = [facts for facts in found if facts["parent"] not in known]
    return "\n".join([job, *_branches(roots, found, "")])


def _branches(siblings: list[Facts], all_: list[Facts], indent: str) -> Iterator[str]:
    for facts in siblings:
        last = facts is siblings[-1]
        children = [child for child in all_ if child["parent"] == facts["lineage"]]
        below = indent + ("   " if last else "│  ")
        yield f"{indent}{'└─' if last else '├─'} {_head(facts)}"
        for line in _facts(facts):
            yield f"{below}{'│' if children else ' '}  {line}"
        yield from _branches(children, all_, below)


def _head(facts: Facts) -> str:
    came = ""
    if facts["from"]:
        epochs = sorted(set(facts["from"].values()))
        which = ", ".join(f"{query} {epoch:,}" for query, epoch in facts["from"].items())
        of = f" of {facts['parent'][:8]}"
        came = f", from epoch {epochs[0]:,}{of}" if len(epochs) == 1 else f", from {which}{of}"
    current = " (current)" if facts["current"] else ""
    return f"{facts['lineage'][:8]}{current}  {facts['reason']}{came}"


def _facts(facts: Facts) -> Iterator[str]:
    who = f" by {facts['who']}" if facts["who"] else ""
    code = f", code {str(facts['code'])[:12]}" if facts["code"] else ""
    yield f"{facts['at']}{who}{code}"
    for query, epochs in facts["queries"].items():
        if epochs is None:
            yield f"{query}: nothing decided yet"
        elif epochs["first"] == epochs["last"]:
            yield f"{query}: epoch {epochs['last']:,}"
        else:
            yield f"{query}: epochs {epochs['first']:,} to {epochs['last']:,}"
    for savepoint in facts["savepoints"]:
        which = ", ".join(f"{query} {epoch:,}" for query, epoch in savepoint["epochs"].items())
        yield f"savepoint {savepoint['name']} (after {which})"
