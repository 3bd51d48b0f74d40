"""`onceflow state`"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import click

from onceflow.cli.output import home_option, json_option, number, show, table
from onceflow.cli.status import chosen
from onceflow.snapshots.state import choose, states

query_option = click.option("--query", metavar="NAME", help="Only this query.")
epoch_option = click.option(
    "--epoch",
    metavar="N",
    type=click.IntRange(min=0),
    help="At the end of this epoch, if it is retained; else of the last decided one.",
)


@click.group("state")
def command() -> None:
    """Spark's own state of a job, while it runs or not."""


@command.command("list")
@click.argument("job")
@query_option
@epoch_option
@home_option
@json_option
def list_(job: str, query: str | None, epoch: int | None, home: str, as_json: bool) -> None:
    """Operators with state, their stores and columns. Without Spark."""
    folder = chosen(home, job)[0]
    found = [
        {
            "query": state.query.name, "lineage": state.query.lineage,
            "epoch": state.decision.epoch, "decided": state.decision.at,
            "retained": [state.epochs[0], state.epochs[-1]],
            "stores": [
                {
                    "operator": store.operator, "kind": store.kind, "store": store.name,
                    "partitions": store.partitions, "key": store.key, "value": store.value,
                    "bytes": state.bytes(store),
                }
                for store in state.stores
            ],
        }
        for state in states(folder, query=query, epoch=epoch)
    ]  # fmt: skip
    show(found, as_json=as_json, text=lambda told: "\n\n".join(map(_list, told)))


def _list(told: dict[str, Any]) -> str:
    first, last = told["retained"]
    title = f"{told['query']} after epoch {told['epoch']:,} (retained: {first:,} to {last:,})"
    if not told["stores"]:
        return f"{title}\n  keeps no state"
    rows = [
        [str(store["operator"]), store["kind"], store["store"],
         number(store["partitions"], "partitions"), number(store["bytes"], "bytes"),
         _columns(store["key"]), _columns(store["value"])]
        for store in told["stores"]
    ]  # fmt: skip
    head = ["operator", "kind", "store", "partitions", "size", "key", "value"]
    return f"{title}\n  " + table(head, rows).replace("\n", "\n  ")


def _columns(columns: list[dict[str, str]] | None) -> str:
    if columns is None:
        return "-"
    return ", ".join(f"{column['name']} {column['type']}" for column in columns)


@command.command("show")
@click.argument("job")
@query_option
@click.option("--operator", metavar="N", type=int, help="Only this operator, by its number.")
@click.option("--store", metavar="NAME", help="Only this store of it; a join has four.")
@epoch_option
@click.option(
    "--key",
    help="Only rows of this key: what one of its columns is equal to, or several columns as JSON, "
    """such as '{"window.start": "2026-01-01T00:00:00Z", "word": "be"}'.""",
)
@click.option(
    "--limit",
    metavar="ROWS",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="At most so many rows of each store.",
)
@home_option
@json_option
def show_(
    job: str, *, query: str | None, operator: int | None, store: str | None, epoch: int | None,
    key: str | None, limit: int, home: str, as_json: bool,
) -> None:  # fmt: skip
    """Rows of state at the end of a retained epoch, by Spark's own reader. Starts Spark.

    --json writes an object a line for each row.
    """
    meant = choose(states(chosen(home, job)[0], query=query, epoch=epoch), operator, store)
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
    from onceflow.session import get_session

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
        [*(_cell(value) for part in ("key", "value") for value in row[part].values()),
         str(row["partition"])]
        for row in rows[:limit]
    ]  # fmt: skip
    text = f"{title}\n  " + table([*head, "partition"], body).replace("\n", "\n  ")
    more = f"\n  … there are more; --limit {limit * 10} shows them" if len(rows) > limit else ""
    return text + more


def _cell(value: Any) -> str:
    if value is None:
        return "null"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
