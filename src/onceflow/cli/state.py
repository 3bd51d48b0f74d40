"""`onceflow state`"""

from __future__ import annotations

import json
import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.display import (
    home_option,
    indented,
    json_option,
    show,
    table,
)
from onceflow.cli.state_files import epoch_option, export, import_, query_option
from onceflow.errors import JobError
from onceflow.protocol.home import select_jobs
from onceflow.service.number_format import number
from onceflow.snapshots.listings import describe_states
from onceflow.snapshots.state_view import choose_stores, states_at

if TYPE_CHECKING:
    from onceflow.snapshots.keyed_state_view import KeyedState

_LARGEST = 5  # key groups that are listed


@click.group("state")
def command() -> None:
    """List, show, export and import the state of a job.

    Keyed steps keep state (docs/state.md), and so do Spark's own operators. All of these commands
    but import work while the job runs or not, on any retained epoch.
    """


command.add_command(export)
command.add_command(import_)


@command.command("list")
@click.argument("job")
@query_option
@epoch_option
@click.option(
    "--groups",
    "every",
    is_flag=True,
    help="List all key groups of keyed steps, not the five largest alone.",
)
@home_option
@json_option
def list_(
    job: str, *, query: str | None, epoch: int | None, every: bool, home: str, as_json: bool
) -> None:
    """List keyed steps and Spark's operators with state.

    It shows the key groups of keyed steps and the stores of operators. It starts no Spark and reads
    no row. The rows of a key group are those in its files: a key that was written in several
    epochs counts several times until its versions are merged.

    With --json: a list with an object for each query: query, lineage, epoch, decided, retained
    (first and last epoch), stores, keyed. Each step of keyed has step, key, states, timers,
    watermark (microseconds), groups, rows, bytes, runs (files), largest_to_mean, and by_group.

    \b
    onceflow state list shop
    """
    folder = select_jobs(home, job)[0]
    found = describe_states(folder, query=query, epoch=epoch)
    show(found, as_json=as_json, text=lambda answer: "\n\n".join(_list(a, every) for a in answer))


def _list(answer: dict[str, Any], every: bool) -> str:
    first, last = answer["retained"]
    title = f"{answer['query']} after epoch {answer['epoch']:,} (retained: {first:,} to {last:,})"
    parts = [_steps(answer["keyed"], every=every)] if answer["keyed"] else []
    parts += [_stores(answer["stores"])] if answer["stores"] else []
    parts = parts or ["keeps no state"]
    return indented(title, "\n".join(parts))


def _stores(stores: list[dict[str, Any]]) -> str:
    rows = [
        [str(store["operator"]), store["kind"], store["store"],
         number(store["partitions"], "partitions"), number(store["bytes"], "bytes"),
         _columns(store["key"]), _columns(store["value"])]
        for store in stores
    ]  # fmt: skip
    return table(["operator", "kind", "store", "partitions", "size", "key", "value"], rows)


def _steps(steps: list[dict[str, Any]], *, every: bool) -> str:
    """`steps`: as `KeyedState.about` has them."""
    rows = [
        [step["step"], _columns(step["key"]), _columns(step["states"]),
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
    return indented(title, table(["group", "rows", "size", "share"], rows))


# ---------------------------------------------------------------- show


@command.command("show")
@click.argument("job")
@query_option
@click.option("--step", metavar="NAME", help="Only this keyed step.")
@click.option("--operator", metavar="N", type=int, help="Only this operator of Spark.")
@click.option("--store", metavar="NAME", help="Only this store of the operator; a join has four.")
@epoch_option
@click.option(
    "--key",
    help="Keyed step: look up this key, given as the value of its only column, or of all columns "
    """as JSON: '{"user": 7, "day": "2026-01-01"}' or '[7, "2026-01-01"]'. Spark's state: """
    "rows in which one column of the key is equal to this text, or several columns given as JSON.",
)
@click.option(
    "--limit",
    metavar="ROWS",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="The most rows of each step or store.",
)
@home_option
@json_option
def show_(
    job: str, *, query: str | None, step: str | None, operator: int | None, store: str | None,
    epoch: int | None, key: str | None, limit: int, home: str, as_json: bool,
) -> None:  # fmt: skip
    """Show rows of state.

    Keyed steps are read without Spark. Spark's own state needs Spark, which is started on this
    machine (local[*]). Without --step and --operator both are shown; state of transformWithState
    is not. A keyed value that has outlived its ttl is shown until a merge removes it.

    With --json: one object a line: query, epoch, and for a keyed step step, group, key, state
    (null: the key has none), timers, written (when values with a ttl were written); for Spark
    operator, store, key, value, partition.

    \b
    onceflow state show shop --key ann
    onceflow state show shop --key '{"user": "ann", "shop": 2}' --epoch 20
    onceflow state show word-count --key '{"window.start": "2026-01-01T00:00:00Z"}'
    """
    if step is not None and (operator is not None or store is not None):
        raise JobError(
            "--step is for keyed steps, --operator and --store are for the state of Spark",
            hint="leave out one of them",
        )
    folder = select_jobs(home, job)[0]
    found = states_at(folder, query=query, epoch=epoch)
    steps = [keyed for state in found for keyed in state.keyed]
    of_spark = operator is not None or store is not None
    if steps or step is not None:
        if not of_spark:
            from onceflow.snapshots.keyed_state_view import choose_step

            for keyed in choose_step(folder, steps, step, one=key is not None):
                _show_step(keyed, key=key, limit=limit, as_json=as_json)
        of_spark = of_spark or (step is None and any(state.stores for state in found))
        if not of_spark:
            return
    stores = choose_stores(found, operator, store)
    if not as_json:
        click.echo("starting Spark to read the state …", err=True)
    spark = _session()
    for state, spark_store in stores:
        rows = state.rows(spark, spark_store, key=key, limit=limit + 1)
        of = {
            "query": state.query.name, "epoch": state.decision.epoch,
            "operator": spark_store.operator, "store": spark_store.name,
        }  # fmt: skip
        if as_json:
            for row in rows[:limit]:
                click.echo(json.dumps({**of, **row}, ensure_ascii=False))
        else:
            click.echo(_rows(of, spark_store.kind, rows, limit))


def _session() -> Any:
    from onceflow.spark.session import get_session

    with tempfile.TemporaryDirectory(prefix="onceflow-spark-") as folder:
        return get_session("local[*]", log=Path(folder) / "spark.log")


def _rows(of: dict[str, Any], kind: str, rows: list[dict[str, Any]], limit: int) -> str:
    title = (
        f"{of['query']} after epoch {of['epoch']:,}: operator {of['operator']} ({kind}), "
        f"store {of['store']}"
    )
    if not rows:
        return indented(title, "no rows")
    parts = ("key", "value")
    head = [*(f"{part}.{name}" for part in parts for name in rows[0][part]), "partition"]
    return indented(title, _some(head, parts, "partition", rows, limit))


def _some(
    head: list[str], parts: tuple[str, ...], last: str, rows: list[dict[str, Any]], limit: int
) -> str:
    """At most `limit` rows: the values of their parts, and the last column."""
    body = [
        [*(_cell(value) for part in parts for value in row[part].values()), str(row[last])]
        for row in rows[:limit]
    ]
    more = f"\n… there are more; --limit {limit * 10} shows them" if len(rows) > limit else ""
    return table(head, body) + more


def _show_step(state: KeyedState, *, key: str | None, limit: int, as_json: bool) -> None:
    """Show one key of a step, or its first rows."""
    of = {"query": state.query.name, "epoch": state.decision.epoch, "step": state.step}
    if key is None:
        rows = list(islice(state.rows(), limit + 1))
        nothing = "no rows"
    else:
        lookup = state.look_up(key)
        rows = [lookup.row] if lookup.row is not None else []
        named = ", ".join(f"{name}={_cell(value)}" for name, value in lookup.key.items())
        nothing = f"no state for {named}, key group {lookup.group}"
        if as_json and not rows:
            rows = [{"group": lookup.group, "key": lookup.key, "state": None}]
    if as_json:
        for row in rows[:limit]:
            click.echo(json.dumps({**of, **row}, ensure_ascii=False))
        return
    title = f"{of['query']} after epoch {of['epoch']:,}: keyed step {of['step']}"
    parts = ("key", "state", "timers")
    if rows:
        head = [*(name for part in parts for name in rows[0][part]), "key group"]
        nothing = _some(head, parts, "group", rows, limit)
    click.echo(indented(title, nothing))


def _columns(found: list[dict[str, str]] | None) -> str:
    if found is None:
        return "-"
    return ", ".join(f"{column['name']} {column['type']}" for column in found)


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
