"""`onceflow state export` and `onceflow state import`: keyed state as Parquet files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.display import ProgressLine, home_option, is_terminal, json_option, show
from onceflow.cli.restore import outputs_table, plan_option
from onceflow.errors import JobError
from onceflow.jobs.stop_request import who
from onceflow.protocol.home import JobFolder, select_jobs
from onceflow.service.number_format import number
from onceflow.snapshots.state_view import states_at

if TYPE_CHECKING:
    from onceflow.snapshots.keyed_state_view import KeyedState

query_option = click.option("--query", metavar="NAME", help="Only this query.")
epoch_option = click.option(
    "--epoch",
    metavar="N",
    type=click.IntRange(min=0),
    help="At the end of this epoch, if it is retained; by default of the last decided one.",
)
step_option = click.option("--step", metavar="NAME", required=True, help="The keyed step.")


def _one(
    folder: JobFolder, step: str, *, query: str | None, epoch: int | None = None
) -> KeyedState:
    from onceflow.snapshots.keyed_state_view import choose_step

    steps = [
        keyed for state in states_at(folder, query=query, epoch=epoch) for keyed in state.keyed
    ]
    return choose_step(folder, steps, step, one=True)[0]


@click.command("export")
@click.argument("job")
@step_option
@click.option(
    "--to",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to write to, new or empty.",
)
@query_option
@epoch_option
@home_option
@json_option
def export(
    job: str, *, step: str, to: Path, query: str | None, epoch: int | None, home: str, as_json: bool
) -> None:
    """Export the state of a keyed step to Parquet files.

    There is a row for each key. The columns are those of the key, the states and the timers, and
    for each state with a ttl _written.NAME (microseconds since 1970). _onceflow.json beside them
    names job, query, step, lineage, epoch, schema and rows. A failed export leaves nothing.

    With --json: one object with job, query, step, epoch, lineage, rows, to.

    \b
    onceflow state export shop --step spend --to fix/state
    """
    state = _one(select_jobs(home, job)[0], step, query=query, epoch=epoch)
    groups = state.manifest.groups
    with ProgressLine(f"{{:,}} of {groups:,} key groups", quiet=as_json) as progress:
        rows = state.export(to.absolute(), progress)
    answer = {
        "job": job, "query": state.query.name, "step": step, "epoch": state.decision.epoch,
        "lineage": state.query.lineage, "rows": rows, "to": str(to.absolute()),
    }  # fmt: skip
    show(
        answer,
        as_json=as_json,
        text=lambda t: (
            f"{number(t['rows'], 'rows')} of {t['query']} after epoch {t['epoch']:,}, "
            f"keyed step {t['step']}, are in {t['to']}"
        ),
    )


@click.command("import")
@click.argument("job")
@step_option
@click.option(
    "--from",
    "source",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="A folder with Parquet files, or one file: their rows become the state.",
)
@query_option
@plan_option
@click.option("--yes", is_flag=True, help="Do not ask. Needed if there is no terminal.")
@home_option
@json_option
def import_(job: str, *, step: str, source: Path, home: str, **options: Any) -> None:
    """Replace the state of a keyed step by Parquet files.

    The job must be stopped. It continues where it stands in a new lineage, and nothing that was
    published is touched. The old lineage keeps its state: onceflow rollback --lineage returns to
    it.

    Rows may be in any order. Columns are matched by name; numbers may be narrower than those of
    the state. A missing state is null; a missing _written.NAME means now. Refused before anything
    changes: an unknown column, a missing key column, a type that does not fit, a key given twice.

    With --json: one object with job, query, step, epoch, rows, absent (states that not all files
    have), lineage (the new one; null with --plan), ended (the old one), outputs (as of onceflow
    restore).

    \b
    onceflow state import shop --step spend --from fix/state --plan
    onceflow state import shop --step spend --from fix/state --yes
    """
    from onceflow.snapshots.state_import import prepared_import

    folder = select_jobs(home, job)[0]
    as_json, only_plan = options["as_json"], options["only_plan"]
    state = _one(folder, step, query=options["query"])
    with (
        ProgressLine("{:,} rows read", quiet=as_json) as progress,
        prepared_import(folder, state, source.absolute(), progress) as ready,
    ):
        progress.clear()
        answers = [vars(answer) for answer in ready.restore.plan()]
        answer: dict[str, Any] = {
            "job": job, "query": state.query.name, "step": step, "epoch": state.decision.epoch,
            "rows": ready.loaded.rows, "absent": list(ready.loaded.absent),
            "lineage": None, "ended": state.query.lineage, "outputs": answers,
        }  # fmt: skip
        if not only_plan:
            _ask(answer, yes=options["yes"], as_json=as_json)
            answer["lineage"] = ready.restore.run({"who": who(), "savepoint": None})
    show(answer, as_json=as_json, text=_imported)


def _ask(answer: dict[str, Any], *, yes: bool, as_json: bool) -> None:
    if yes:
        return
    if as_json or not is_terminal() or not sys.stdin.isatty():
        raise JobError(
            f"replacing the state of {answer['step']} needs a yes, and there is no terminal to ask",
            hint="add --yes; --plan says what would be done",
        )
    click.echo(_summary(answer))
    click.confirm("replace it?", abort=True)


def _summary(answer: dict[str, Any]) -> str:
    absent = [f"  {name} is not in all files: null where it is not" for name in answer["absent"]]
    return "\n".join([
        f"keyed step {answer['step']} of {answer['query']} after epoch {answer['epoch']:,}: "
        f"{number(answer['rows'], 'rows')} become its state",
        *absent,
        outputs_table(answer["outputs"]),
    ])  # fmt: skip


def _imported(answer: dict[str, Any]) -> str:
    if answer["lineage"] is None:
        return f"{_summary(answer)}\nnothing was changed"
    back = (
        f"onceflow rollback {answer['job']} --lineage {answer['ended'][:8]} --to {answer['epoch']}"
    )
    return (
        f"{_summary(answer)}\njob {answer['job']} continues in lineage {answer['lineage'][:8]}; "
        f"to undo it: {back} --published CHOICE"
    )
