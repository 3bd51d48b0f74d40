"""`onceflow kafka`"""

from __future__ import annotations

from typing import Any

import click

from onceflow.cli.display import home_option, json_option, show, table
from onceflow.protocol.home import select_jobs
from onceflow.service.number_format import number
from onceflow.service.open_transactions import open_transactions


@click.group("kafka")
def command() -> None:
    """Show and end the transactions that a job left open in Kafka."""


@command.command("transactions")
@click.argument("job")
@click.option("--abort", is_flag=True, help="End what the job left open. Refused while it runs.")
@home_option
@json_option
def transactions(job: str, abort: bool, home: str, as_json: bool) -> None:
    """Show the open transactions in the topics of a job.

    It lists the transactional ids of each Kafka output, and what is open in its topic. An open
    transaction holds back consumers that read committed rows until the broker ends it after its
    timeout. The next start of the job ends what the job left open; --abort does so without a
    start. What is open after that belongs to another program.

    With --json: a list with an object for each Kafka output: query, output, topic, ledger, ids,
    aborted, and open: topic, partition, stable (where readers stop) and end of each. Exit codes:
    0; 5 a driver leads the job (with --abort).

    \b
    onceflow kafka transactions orders
    onceflow kafka transactions orders --abort
    """
    folder = select_jobs(home, job)[0]
    show(open_transactions(folder, abort=abort), as_json=as_json, text=_text)


def _text(found: list[dict[str, Any]]) -> str:
    if not found:
        return "the job has no Kafka output"
    return "\n\n".join(_output(output) for output in found)


def _output(found: dict[str, Any]) -> str:
    lines = [f"output {found['output']}, topic {found['topic']}"]
    lines += [f"  {id}{': ended' if found['aborted'] else ''}" for id in found["ids"]]
    if not found["open"]:
        return "\n".join([*lines, "nothing is open"])
    rows = [
        [
            o["topic"],
            str(o["partition"]),
            f"{o['stable']:,}",
            number(o["end"] - o["stable"], "rows"),
        ]
        for o in found["open"]
    ]
    partitions = table(["topic", "partition", "readers stop at", "held back, at most"], rows)
    whose = "of another program" if found["aborted"] else "of this job, or of another program"
    return "\n".join(
        [*lines, partitions, f"open transactions ({whose}) hold back these partitions"]
    )
