"""`onceflow epoch`"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show, table
from onceflow.errors import JobError, OnceflowError
from onceflow.jobs.job import load
from onceflow.protocol.home import JobFolder, select_jobs
from onceflow.service.number_format import iso_time, number
from onceflow.snapshots.epochs import describe_epoch
from onceflow.snapshots.lineages import find_lineage
from onceflow.snapshots.shapes import Epoch
from onceflow.spark.session import get_session

_LONGEST = 100
_SAME = {"same": True}


@click.group("epoch")
def command() -> None:
    """Show what one epoch read and wrote."""


@command.command("show")
@click.argument("job")
@click.argument("epoch", type=click.IntRange(min=0))
@click.option(
    "--query", metavar="NAME", help="Only this query; by default each that has the epoch."
)
@click.option(
    "--lineage",
    metavar="ID",
    help="The lineage that decided it, by the first characters of its id; by default the current "
    "one, or the one that it continues.",
)
@click.option(
    "--rerun",
    metavar="JOB.py[:name]",
    help="Run the epoch again with this code, on a fork that is removed afterwards, and compare "
    "the rows. Starts Spark.",
)
@home_option
@json_option
def show_(
    job: str, epoch: int, *, query: str | None, lineage: str | None, rerun: str | None, home: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Show the input, output, state and times of an epoch.

    Of any retained epoch, while the job runs or not. If an epoch was slow, compare "stage" (the
    work of Spark) with "publish" (the targets). If --rerun finds other rows, the query is not
    deterministic (the columns that differ are listed), or code or input have changed.

    With --json: a list with an object for each query: query, epoch, lineage, decided, term, nonce,
    input, rows_in, outputs, state, state_rows, keyed, watermark_ms, ms (time of each step),
    spark_ms, and rerun with --rerun. Rows in, rows of state and times are null if the driver was
    killed before it wrote them down. Exit codes: 0; 9 the rows of --rerun are not the same.

    \b
    onceflow epoch show word-count 21
    onceflow epoch show word-count 21 --rerun word_count.py
    """
    folder = select_jobs(home, job)[0]
    found = describe_epoch(
        folder, epoch, query=query, lineage=lineage and find_lineage(folder, lineage)
    )
    if rerun is not None:
        again = _rerun(folder, rerun, found, as_json=as_json)
        for facts in found:
            facts["rerun"] = again[facts["query"]]
    show(found, as_json=as_json, text=lambda facts: "\n\n".join(map(_text, facts)))
    sys.exit(0 if all(facts.get("rerun", _SAME)["same"] for facts in found) else 9)


def _rerun(
    folder: JobFolder, spec: str, found: list[Epoch], *, as_json: bool
) -> dict[str, dict[str, Any]]:
    from onceflow.jobs.rerun import rerun
    from onceflow.service.driver import find_by_workers, keep_libraries_quiet, send_to_workers
    from onceflow.service.error_report import describe_error

    if not as_json:
        click.echo("starting Spark to run the epoch again …", err=True)
    file = spec.partition(":")[0]
    find_by_workers(file)
    keep_libraries_quiet()
    log = folder.folder / "spark.log"
    spark = get_session(log=log)
    try:
        job = load(spec)
        send_to_workers(file)
        return {
            facts["query"]: rerun(job, folder, facts["epoch"], query=facts["query"], spark=spark)
            for facts in found
        }
    except OnceflowError:
        raise
    except Exception as error:  # of the job, or of Spark because of it
        described = describe_error(error, Path(file), log=log)
        problem = JobError(described.message, hint=described.hint)
        problem.exit_code = described.exit_code
        raise problem from error


def _text(facts: dict[str, Any]) -> str:
    decision = facts["decision"]
    lines = [
        f"epoch {facts['epoch']:,} of {facts['job']}/{facts['query']}, "
        f"lineage {facts['lineage'][:8]}",
        f"decided {decision['at']} in term {decision['term']} ({decision['nonce'][:8]})",
        "",
        table(["source", "from", "to", "files"], [
            [part["source"], _offset(part["start"]), _offset(part["end"]),
             "-" if part["files"] is None else number(part["files"], "files")]
            for part in facts["input"]
        ]),
        f"rows in: {_known(facts['rows_in'], 'rows')}",
        "",
        table(["output", "rows", "files", "size", "mode", "guarantee"], [
            [part["output"], number(part["rows"], "rows"), number(part["files"], "files"),
             number(part["bytes"], "bytes"), part["mode"], part["guarantee"]]
            for part in facts["outputs"]
        ]),
    ]  # fmt: skip
    if facts["state"]:
        rows = [
            [str(part["operator"]), part["kind"] or "-", number(part["partitions"], "partitions"),
             part["ids"][0][0][:8] if part["ids"] and part["ids"][0] else "-"]
            for part in facts["state"]
        ]  # fmt: skip
        lines += ["", table(["operator", "kind", "partitions", "first id"], rows)]
        lines.append(f"rows of state: {_known(facts['state_rows'], 'rows')}")
    if facts["keyed"]:
        rows = [
            [part["step"], number(part["rows"], "rows"), number(part["late"], "rows"),
             number(part["fired"], "keys"),
             "-" if part["watermark_ms"] is None else iso_time(part["watermark_ms"])]
            for part in facts["keyed"]
        ]  # fmt: skip
        head = ["keyed step", "rows in", "late", "timers fired of", "watermark of the next epoch"]
        lines += ["", table(head, rows)]
    if facts["watermark_ms"] is not None:
        lines += ["", f"watermark of the next epoch: {iso_time(facts['watermark_ms'])}"]
    took = "not known"
    if facts["ms"]:
        took = ", ".join(f"{step} {ms:,.0f} ms" for step, ms in facts["ms"].items())
    lines += ["", f"time by step: {took}"]
    if "rerun" in facts:
        lines += ["", _rerun_text(facts["rerun"])]
    return "\n".join(lines)


def _rerun_text(facts: dict[str, Any]) -> str:
    rows, by = facts["rows"], f"compared by {facts['compared_by']}"
    if facts["same"]:
        return f"ran it again: the same {number(rows['now'], 'rows')}, {by}"
    text = f"ran it again: NOT the same, {by}: {rows['then']:,} rows then, {rows['now']:,} now"
    if facts["columns"]:
        return f"{text}\n  run twice more, these columns differ: {', '.join(facts['columns'])}"
    if facts["columns"] is None:
        return text
    return f"{text}\n  run twice, it gives the same rows: code or input have changed since"


def _known(value: int | None, unit: str) -> str:
    return "not known" if value is None else number(value, unit)


def _offset(offset: Any) -> str:
    text = "the beginning" if offset is None else json.dumps(offset, separators=(",", ":"))
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
