"""`onceflow state`"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from onceflow.cli import state_keyed
from onceflow.cli.display import home_option, json_option, show, table
from onceflow.cli.state_keyed import cell, epoch_option, query_option
from onceflow.errors import JobError
from onceflow.protocol.home import chosen
from onceflow.service.units import number
from onceflow.snapshots.listings import states_told
from onceflow.snapshots.state_view import choose, states


@click.group("state")
def command() -> None:
    """The state of a job: keyed steps', and Spark's own."""


command.add_command(state_keyed.export)
command.add_command(state_keyed.import_)


@command.command("list")
@click.argument("job")
@query_option
@epoch_option
@click.option("--groups", "every", is_flag=True, help="All key groups, not the largest ones.")
@home_option
@json_option
def list_(
    job: str, *, query: str | None, epoch: int | None, every: bool, home: str, as_json: bool
) -> None:
    """Keyed steps and how even their key groups are; Spark's operators with state, their stores
    and columns. While the job runs or not, without Spark.
    """
    folder = chosen(home, job)[0]
    found = states_told(folder, query=query, epoch=epoch)
    show(found, as_json=as_json, text=lambda told: "\n\n".join(_list(t, every) for t in told))


def _list(told: dict[str, Any], every: bool) -> str:
    first, last = told["retained"]
    title = f"{told['query']} after epoch {told['epoch']:,} (retained: {first:,} to {last:,})"
    if not told["stores"] and not told["keyed"]:
        return f"{title}\n  keeps no state"
    parts = [state_keyed.listed(told["keyed"], every=every)] if told["keyed"] else []
    if told["stores"]:
        parts.append(_stores(told["stores"]))
    return f"{title}\n  " + "\n".join(parts).replace("\n", "\n  ")


def _stores(stores: list[dict[str, Any]]) -> str:
    rows = [
        [str(store["operator"]), store["kind"], store["store"],
         number(store["partitions"], "partitions"), number(store["bytes"], "bytes"),
         state_keyed.columns(store["key"]), state_keyed.columns(store["value"])]
        for store in stores
    ]  # fmt: skip
    return table(["operator", "kind", "store", "partitions", "size", "key", "value"], rows)


@command.command("show")
@click.argument("job")
@query_option
@click.option("--step", metavar="NAME", help="Only this keyed step.")
@click.option("--operator", metavar="N", type=int, help="Only this operator of Spark's.")
@click.option("--store", metavar="NAME", help="Only this store of it; a join has four.")
@epoch_option
@click.option(
    "--key",
    help="Of a keyed step: the state of this key, as the value of its only column, or with all of "
    """them as JSON, such as '{"user": 7, "day": "2026-01-01"}' or '[7, "2026-01-01"]'. Of """
    "Spark's state: rows of which a column of the key is equal to this, or several as an object.",
)
@click.option(
    "--limit",
    metavar="ROWS",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="At most so many rows of each step or store.",
)
@home_option
@json_option
def show_(
    job: str, *, query: str | None, step: str | None, operator: int | None, store: str | None,
    epoch: int | None, key: str | None, limit: int, home: str, as_json: bool,
) -> None:  # fmt: skip
    """Rows of state at the end of a retained epoch: of keyed steps without Spark, of Spark's own
    state by Spark's own reader, which starts Spark.

    --json writes an object a line for each row.
    """
    if step is not None and (operator is not None or store is not None):
        raise JobError(
            "--step is of keyed state, --operator and --store of Spark's", hint="drop one"
        )
    folder = chosen(home, job)[0]
    found = states(folder, query=query, epoch=epoch)
    steps = [keyed for state in found for keyed in state.keyed]
    of_spark = operator is not None or store is not None
    if steps or step is not None:
        if not of_spark:
            from onceflow.snapshots.keyed_state_view import choose_step

            for keyed in choose_step(folder, steps, step, one=key is not None):
                state_keyed.show_rows(keyed, key=key, limit=limit, as_json=as_json)
        of_spark = of_spark or (step is None and any(state.stores for state in found))
        if not of_spark:
            return
    meant = choose(found, operator, store)
    if not as_json:
        click.echo("starting Spark to read the state …", err=True)
    spark = _session()
    for state, held in meant:
        rows = state.rows(spark, held, key=key, limit=limit + 1)
        of = {
            "query": state.query.name, "epoch": state.decision.epoch, "operator": held.operator,
            "store": held.name,
        }  # fmt: skip
        if as_json:
            for row in rows[:limit]:
                click.echo(json.dumps({**of, **row}, ensure_ascii=False))
        else:
            click.echo(_rows(of, held.kind, rows, limit))


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
        return f"{title}\n  no rows"
    head = [f"{part}.{name}" for part in ("key", "value") for name in rows[0][part]]
    body = [
        [*(cell(value) for part in ("key", "value") for value in row[part].values()),
         str(row["partition"])]
        for row in rows[:limit]
    ]  # fmt: skip
    text = f"{title}\n  " + table([*head, "partition"], body).replace("\n", "\n  ")
    more = f"\n  … there are more; --limit {limit * 10} shows them" if len(rows) > limit else ""
    return text + more
