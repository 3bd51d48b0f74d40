"""`onceflow restore` and `onceflow rollback`"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show, table
from onceflow.jobs.stop_request import who
from onceflow.protocol.home import JobFolder, select_jobs
from onceflow.snapshots.epochs import cuts_at
from onceflow.snapshots.lineages import find_lineage
from onceflow.snapshots.listings import find_savepoint
from onceflow.snapshots.restore import Restore
from onceflow.snapshots.savepoint_import import SavepointImport

published_option = click.option(
    "--published",
    metavar="[QUERY/OUTPUT=]CHOICE",
    multiple=True,
    help="What happens to rows that were published since: rewind takes them back from the target, "
    "skip leaves them and runs their epochs again without publishing, replay publishes them once "
    "more. For all outputs, or for one; may be given several times. There is no default.",
)
plan_option = click.option(
    "--plan", "only_plan", is_flag=True, help="Say what would be done, and change nothing."
)


@click.command("restore")
@click.argument("job")
@click.argument("savepoint")
@published_option
@plan_option
@home_option
@json_option
def command(job: str, savepoint: str, *, home: str, **options: Any) -> None:
    """Continue a job from a savepoint, in a new lineage.

    SAVEPOINT is a name, or the path of a folder that one was moved to; with a path the home need
    not know the job (a new machine). The job must be stopped. Its next start works in the new
    lineage. If the command is killed, give it again: it does the rest. docs/operations.md compares
    the choices.

    With --json: one object with job, lineage (the new one; null with --plan), at_once, and outputs:
    query, output, target, cut and published (epochs), choice and says of each. Exit codes: 0; 2 a
    sink cannot do what was asked, or the savepoint is not part of what the job has published; 5
    the job runs; 7 the savepoint is damaged or of another version.

    \b
    onceflow restore shop before-deploy --published rewind --plan
    onceflow restore shop before-deploy --published rewind
    """
    folder = JobFolder(home, job)
    found = find_savepoint(home, job, savepoint)
    found.verify()
    choices = _choices(options.pop("published"))
    restore = (
        SavepointImport(folder, found, choices)
        if folder.first_lineage() is None
        else Restore(folder, found.cuts(), choices, f"restore of {found.name}")
    )
    _run(folder, restore, found.identity, **options)


@click.command("rollback")
@click.argument("job")
@click.option(
    "--to",
    "to",
    required=True,
    metavar="EPOCH|TIME",
    help="The last epoch to keep: its number, or a time before which it was decided.",
)
@click.option(
    "--lineage",
    metavar="ID",
    help="The lineage of the epoch, by the first characters of its id; by default the current one.",
)
@published_option
@plan_option
@home_option
@json_option
def rollback(job: str, *, to: str, lineage: str | None, home: str, **options: Any) -> None:
    """Continue a job from a retained epoch, in a new lineage.

    The job must be stopped. A number is the epoch of every query of the job; where queries differ,
    give a time. While nobody has run the job since, --lineage with the old lineage and its last
    epoch undoes a restore or a rollback.

    With --json: one object with job, lineage (the new one; null with --plan), at_once, and outputs:
    query, output, target, cut and published (epochs), choice and says of each. Exit codes: as of
    onceflow restore.

    \b
    onceflow rollback shop --to 41 --published rewind
    onceflow rollback shop --to 2026-11-16T07:40:00Z --published skip
    """
    folder = select_jobs(home, job)[0]
    cuts = cuts_at(folder, to, lineage=lineage and find_lineage(folder, lineage))
    choices = _choices(options.pop("published"))
    _run(folder, Restore(folder, cuts, choices, f"rollback to {to}"), None, **options)


def _choices(published: tuple[str, ...]) -> dict[str, str]:
    pairs = (text.rpartition("=") for text in published)
    return {output: choice for output, _, choice in pairs}


def _run(
    folder: JobFolder,
    restore: Restore | SavepointImport,
    savepoint: Mapping[str, Any] | None,
    *,
    only_plan: bool,
    as_json: bool,
) -> None:
    answers = [vars(answer) for answer in restore.plan()]
    at_once = isinstance(restore, SavepointImport)
    lineage = None
    if not only_plan:
        lineage = restore.run({"who": who(), "savepoint": savepoint})
    done = {"job": folder.name, "lineage": lineage, "at_once": at_once, "outputs": answers}
    show(done, as_json=as_json, text=_text)


def outputs_table(outputs: list[dict[str, Any]]) -> str:
    """What happens to each output, as a table."""
    rows = [
        [f"{a['query']}/{a['output']}", str(a["cut"]), str(a["published"]), a["says"], a["target"]]
        for a in outputs
    ]
    return table(["output", "cut", "published", "what happens to it", "target"], rows)


def _text(done: dict[str, Any]) -> str:
    lines = outputs_table(done["outputs"])
    if done["lineage"] is None and done["at_once"]:
        return (
            f"{lines}\nnothing was changed; without --plan the targets are moved at once, and the "
            "home that wrote them cannot continue"
        )
    if done["lineage"] is None:
        return f"{lines}\nnothing was changed"
    return f"{lines}\njob {done['job']} continues in lineage {done['lineage'][:8]}"
