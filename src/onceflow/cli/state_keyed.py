"""The state of keyed steps, for `onceflow state`."""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.display import home_option, is_terminal, json_option, show, table
from onceflow.cli.restore import answered, plan_option
from onceflow.errors import JobError
from onceflow.jobs.stop_request import who
from onceflow.protocol.home import chosen
from onceflow.service.units import number
from onceflow.snapshots.state_view import states

if TYPE_CHECKING:
    from onceflow.protocol.home import JobFolder
    from onceflow.snapshots.keyed_state_view import KeyedState

_LARGEST = 5  # key groups that are listed
_TELL_EVERY = 2.0  # seconds

query_option = click.option("--query", metavar="NAME", help="Only this query.")
epoch_option = click.option(
    "--epoch",
    metavar="N",
    type=click.IntRange(min=0),
    help="At the end of this epoch, if it is retained; else of the last decided one.",
)
step_option = click.option("--step", metavar="NAME", required=True, help="The keyed step.")


def columns(found: list[dict[str, str]] | None) -> str:
    if found is None:
        return "-"
    return ", ".join(f"{column['name']} {column['type']}" for column in found)


def cell(value: Any) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- list


def listed(steps: list[dict[str, Any]], *, every: bool) -> str:
    """`steps`: as `KeyedState.about` has them."""
    rows = [
        [step["step"], columns(step["key"]), columns(step["states"]),
         ", ".join(step["timers"]) or "-", str(step["groups"]), number(step["rows"], "rows"),
         number(step["bytes"], "bytes"), str(step["runs"])]
        for step in steps
    ]  # fmt: skip
    head = ["step", "key", "states", "timers", "key groups", "rows", "size", "runs"]
    return "\n".join([table(head, rows), *(_groups(step, every) for step in steps if step["rows"])])


def _groups(step: dict[str, Any], every: bool) -> str:
    groups = step["by_group"]
    if not every:
        groups = sorted(groups, key=lambda group: (-group["rows"], group["group"]))[:_LARGEST]
        groups = [group for group in groups if group["rows"]]
    rows = [
        [str(group["group"]), number(group["rows"], "rows"), number(group["bytes"], "bytes"),
         f"{group['share']:.1%}"]
        for group in groups
    ]  # fmt: skip
    title = (
        f"{step['step']}: {'all' if every else 'the largest'} key groups; the largest has "
        f"{step['largest_to_mean']:.1f} times the mean (rows with older versions of keys)"
    )
    return f"{title}\n  " + table(["group", "rows", "size", "share"], rows).replace("\n", "\n  ")


# ---------------------------------------------------------------- show


def show_rows(state: KeyedState, *, key: str | None, limit: int, as_json: bool) -> None:
    """Rows of a step: one key, or so many."""
    of = {"query": state.query.name, "epoch": state.decision.epoch, "step": state.step}
    if key is None:
        rows = list(islice(state.rows(), limit + 1))
        nothing = "no rows"
    else:
        looked = state.look_up(key)
        rows = [looked.row] if looked.row is not None else []
        named = ", ".join(f"{name}={cell(value)}" for name, value in looked.key.items())
        nothing = f"no state for {named}, key group {looked.group}"
        if as_json and not rows:
            rows = [{"group": looked.group, "key": looked.key, "state": None}]
    if as_json:
        for row in rows[:limit]:
            click.echo(json.dumps({**of, **row}, ensure_ascii=False))
        return
    title = f"{of['query']} after epoch {of['epoch']:,}: keyed step {of['step']}"
    if not rows:
        click.echo(f"{title}\n  {nothing}")
        return
    parts = ("key", "state", "timers")
    head = [name for part in parts for name in rows[0][part]]
    body = [
        [*(cell(value) for part in parts for value in row[part].values()), str(row["group"])]
        for row in rows[:limit]
    ]
    text = table([*head, "key group"], body).replace("\n", "\n  ")
    more = f"\n  … there are more; --limit {limit * 10} shows them" if len(rows) > limit else ""
    click.echo(f"{title}\n  {text}{more}")


# ---------------------------------------------------------------- export and import


def _one(
    folder: JobFolder, step: str, *, query: str | None, epoch: int | None = None
) -> KeyedState:
    from onceflow.snapshots.keyed_state_view import choose_step

    steps = [keyed for state in states(folder, query=query, epoch=epoch) for keyed in state.keyed]
    return choose_step(folder, steps, step, one=True)[0]


class _Progress:
    """Lines on standard error, for what takes longer than a moment."""

    def __init__(self, text: str, *, quiet: bool) -> None:
        self._text, self._quiet, self._next = text, quiet, time.monotonic() + _TELL_EVERY

    def __call__(self, done: int) -> None:
        if not self._quiet and time.monotonic() >= self._next:
            click.echo(self._text.format(done), err=True)
            self._next = time.monotonic() + _TELL_EVERY


@click.command("export")
@click.argument("job")
@step_option
@click.option(
    "--to",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="The folder to write to: a new one, or an empty one.",
)
@query_option
@epoch_option
@home_option
@json_option
def export(
    job: str, *, step: str, to: Path, query: str | None, epoch: int | None, home: str, as_json: bool
) -> None:
    """The state of a keyed step as Parquet files, a row for each key: to look at it with any tool,
    to change it and import it, or to begin another job with it. While the job runs or not.
    """
    state = _one(chosen(home, job)[0], step, query=query, epoch=epoch)
    groups = state.manifest.groups
    rows = state.export(to.absolute(), _Progress(f"{{:,}} of {groups:,} key groups", quiet=as_json))
    told = {
        "job": job, "query": state.query.name, "step": step, "epoch": state.decision.epoch,
        "lineage": state.query.lineage, "rows": rows, "to": str(to.absolute()),
    }  # fmt: skip
    show(
        told,
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
    help="The folder with Parquet files: what is in them becomes the state, and nothing else.",
)
@query_option
@plan_option
@click.option("--yes", is_flag=True, help="Do not ask; needed where there is no terminal.")
@home_option
@json_option
def import_(job: str, *, step: str, source: Path, home: str, **options: Any) -> None:
    """Replace the state of a keyed step by what Parquet files say, in a new lineage.

    The job must be stopped. It goes on where it stands, with the state that was imported; nothing
    that was published is touched. The lineage before keeps its state: rollback with --lineage
    brings it back.
    """
    from onceflow.snapshots.state_import import prepared

    folder = chosen(home, job)[0]
    as_json, only_plan = options["as_json"], options["only_plan"]
    state = _one(folder, step, query=options["query"])
    progress = _Progress("{:,} rows read", quiet=as_json)
    with prepared(folder, state, source.absolute(), progress) as ready:
        answers = [vars(answer) for answer in ready.restore.plan()]
        told: dict[str, Any] = {
            "job": job, "query": state.query.name, "step": step, "epoch": state.decision.epoch,
            "rows": ready.loaded.rows, "absent": list(ready.loaded.absent),
            "lineage": None, "ended": state.query.lineage, "outputs": answers,
        }  # fmt: skip
        if not only_plan:
            _ask(told, yes=options["yes"], as_json=as_json)
            told["lineage"] = ready.restore.run({"who": who(), "savepoint": None})
    show(told, as_json=as_json, text=_imported)


def _ask(told: dict[str, Any], *, yes: bool, as_json: bool) -> None:
    if yes:
        return
    if as_json or not is_terminal() or not sys.stdin.isatty():
        raise JobError(
            f"nobody can be asked whether to replace the state of {told['step']}",
            hint="--plan says what would be done, --yes does it",
        )
    click.echo(_said(told))
    click.confirm("do it?", abort=True)


def _said(told: dict[str, Any]) -> str:
    absent = [f"  {name} is not in all files: null where it is not" for name in told["absent"]]
    return "\n".join([
        f"keyed step {told['step']} of {told['query']} after epoch {told['epoch']:,}: "
        f"{number(told['rows'], 'rows')} become its state",
        *absent,
        answered(told["outputs"]),
    ])  # fmt: skip


def _imported(told: dict[str, Any]) -> str:
    if told["lineage"] is None:
        return f"{_said(told)}\nnothing was changed"
    back = f"onceflow rollback {told['job']} --lineage {told['ended'][:8]} --to {told['epoch']}"
    return (
        f"{_said(told)}\njob {told['job']} goes on in lineage {told['lineage'][:8]}; back again: "
        f"{back} --published CHOICE"
    )
