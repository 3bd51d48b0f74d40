"""`onceflow restore` and `onceflow rollback`"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show, table
from onceflow.jobs.stop_request import who
from onceflow.protocol.home import JobFolder, chosen
from onceflow.snapshots.epochs import retained
from onceflow.snapshots.import_savepoint import Arrive
from onceflow.snapshots.lineages import find
from onceflow.snapshots.listings import find as find_savepoint
from onceflow.snapshots.restore import Restore

published_option = click.option(
    "--published",
    metavar="[QUERY/OUTPUT=]CHOICE",
    multiple=True,
    help="Rows that were published after the cut: take them back (rewind), leave them and compute "
    "their epochs again without publishing (skip), or publish them once more (replay). For all "
    "outputs, or for one; may be given several times.",
)
plan_option = click.option("--plan", "only_plan", is_flag=True, help="Say what would be done.")


@click.command("restore")
@click.argument("job")
@click.argument("savepoint")
@published_option
@plan_option
@home_option
@json_option
def command(job: str, savepoint: str, *, home: str, **options: Any) -> None:
    """Go on from a savepoint: of this job by its name, or from any folder that it was moved to,
    also on a home that does not know the job (a new machine).

    The job must be stopped. Its next start works in the new lineage. Killed in between, the same
    command does the rest.
    """
    folder = JobFolder(home, job)
    found = find_savepoint(home, job, savepoint)
    found.verify()
    choices = _choices(options.pop("published"))
    going = (
        Arrive(folder, found, choices)
        if folder.first_lineage() is None
        else Restore(folder, found.cuts(), choices, f"restore of {found.name}")
    )
    _go_back(folder, going, found.identity, **options)


@click.command("rollback")
@click.argument("job")
@click.option("--to", "to", required=True, metavar="EPOCH|TIME", help="The last epoch to keep.")
@click.option(
    "--lineage",
    metavar="ID",
    help="The lineage that the epoch is of, by the first characters of its id; else the current.",
)
@published_option
@plan_option
@home_option
@json_option
def rollback(job: str, *, to: str, lineage: str | None, home: str, **options: Any) -> None:
    """Go back to a retained epoch, or to the last one that was decided before a time.

    The job must be stopped. After a restore that nobody has run yet, --lineage with the old
    lineage and its last epoch undoes it.
    """
    folder = chosen(home, job)[0]
    cuts = retained(folder, to, lineage=lineage and find(folder, lineage))
    choices = _choices(options.pop("published"))
    _go_back(folder, Restore(folder, cuts, choices, f"rollback to {to}"), None, **options)


def _choices(published: tuple[str, ...]) -> dict[str, str]:
    pairs = (text.rpartition("=") for text in published)
    return {output: choice for output, _, choice in pairs}


def _go_back(
    folder: JobFolder,
    going: Restore | Arrive,
    savepoint: Mapping[str, Any] | None,
    *,
    only_plan: bool,
    as_json: bool,
) -> None:
    answers = [vars(answer) for answer in going.plan()]
    arrives = isinstance(going, Arrive)
    lineage = None
    if not only_plan:
        lineage = going.run({"who": who(), "savepoint": savepoint})
    done = {"job": folder.name, "lineage": lineage, "at_once": arrives, "outputs": answers}
    show(done, as_json=as_json, text=_text)


def answered(outputs: list[dict[str, Any]]) -> str:
    """What becomes of each output, as a table."""
    rows = [
        [f"{a['query']}/{a['output']}", str(a["cut"]), str(a["published"]), a["says"], a["target"]]
        for a in outputs
    ]
    return table(["output", "cut", "published", "what becomes of it", "target"], rows)


def _text(done: dict[str, Any]) -> str:
    lines = answered(done["outputs"])
    if done["lineage"] is None and done["at_once"]:
        return (
            f"{lines}\nnothing was changed; without --plan the targets are moved at once, and the "
            "home that wrote them cannot go on"
        )
    if done["lineage"] is None:
        return f"{lines}\nnothing was changed"
    return f"{lines}\njob {done['job']} goes on in lineage {done['lineage'][:8]}"
