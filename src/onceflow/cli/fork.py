"""`onceflow fork`"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show, table
from onceflow.cli.restore import plan_option
from onceflow.errors import CheckpointRefused, JobError
from onceflow.jobs.stop_request import who
from onceflow.protocol.home import JobFolder, select_jobs
from onceflow.snapshots.cut import Cut, last_cut
from onceflow.snapshots.fork import Fork
from onceflow.snapshots.listings import find_savepoint
from onceflow.snapshots.published_history import History

_TRIES = 5


@click.command("fork")
@click.argument("job")
@click.option("--as", "name", metavar="NEW", required=True, help="The name of the fork.")
@click.option(
    "--from",
    "savepoint",
    metavar="SAVEPOINT",
    help="The savepoint that it starts from, by name or path; by default where the job stands.",
)
@click.option(
    "--outputs",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The folder of outputs that are files: DIR/QUERY/OUTPUT.",
)
@click.option(
    "--output",
    "named",
    metavar="QUERY/OUTPUT=NAME",
    multiple=True,
    help="The path, table or topic of one output; needed for those in servers.",
)
@plan_option
@home_option
@json_option
def command(job: str, *, name: str, home: str, **options: Any) -> None:
    """Make a second job that starts with the state of a job and has its own outputs.

    Use it to try new code on real state. The first job may run; neither it nor its targets are
    touched. Run the fork with onceflow run JOB.py --as NEW.

    With --json: one object with job, of, lineage (null with --plan), and outputs: query, output,
    of and to of each.

    \b
    onceflow fork shop --as whatif --outputs out/whatif
    """
    parent = JobFolder(home, job) if options["savepoint"] else select_jobs(home, job)[0]
    named = dict(_pair(text) for text in options["named"])
    for last in (False,) * (_TRIES - 1) + (True,):
        try:
            fork, reason = _fork(parent, JobFolder(home, name), options["savepoint"])
            moves = fork.plan(options["outputs"], named)
            lineage = None
            if not options["only_plan"]:
                lineage = fork.run(moves, reason, {"who": who()})
            break
        except (FileNotFoundError, CheckpointRefused):  # Spark removed it before it was copied
            if last or options["savepoint"]:
                raise
    facts = {
        "job": name, "of": job, "lineage": lineage, "outputs": [vars(move) for move in moves],
    }  # fmt: skip
    show(facts, as_json=options["as_json"], text=_text)


def _fork(parent: JobFolder, folder: JobFolder, savepoint: str | None) -> tuple[Fork, str]:
    if savepoint is None:
        cuts: dict[str, tuple[str, Cut]] = {}
        for query in parent.queries():
            cut = last_cut(query)
            if cut is not None:
                cuts[query.name] = (query.lineage, cut)
        reason, starts = f"fork of {parent.name}", parent.starts()
    else:
        found = find_savepoint(str(parent.home), parent.name, savepoint)
        found.verify()
        cuts, starts = found.cuts(), found.body["starts"]
        reason = f"fork of {parent.name} at {found.name}"
    if not cuts:
        raise JobError(f"job {parent.name} has not decided an epoch yet", hint="let it run first")
    if parent.first_lineage() is None:
        return Fork(parent.name, cuts, found.body["outputs"], starts, folder), reason
    lineage = parent.lineage()
    assert lineage is not None
    targets = {query: History(parent, query, lineage).targets() for query in cuts}
    return Fork(parent.name, cuts, targets, starts, folder), reason


def _pair(text: str) -> tuple[str, str]:
    output, equals, name = text.partition("=")
    if not equals or not name or "/" not in output:
        raise JobError(
            f"--output {text!r} is not of the form QUERY/OUTPUT=NAME",
            hint="for instance --output orders/valid=orders_whatif",
        )
    return output, name


def _text(facts: dict[str, Any]) -> str:
    rows = [[f"{m['query']}/{m['output']}", m["of"], m["to"]] for m in facts["outputs"]]
    lines = table(["output", f"of {facts['of']}", f"of {facts['job']}"], rows)
    if facts["lineage"] is None:
        return f"{lines}\nnothing was changed"
    return f"{lines}\nrun it: onceflow run JOB.py --as {facts['job']}"
