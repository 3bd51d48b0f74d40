"""`onceflow demo`"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onceflow.cli.demo_screen import WORDS
from onceflow.cli.output import json_option
from onceflow.cli.telling import screen, shown_on

if TYPE_CHECKING:
    from onceflow.demo.play import Play

_LOOK = "SELECT campaign, sum(clicks) FROM ad_minutes GROUP BY campaign"
_LOOK_IN_PYTHON = "import sqlite3; print(*sqlite3.connect('serving.db').execute('{}'), sep='\\n')"


@click.command("demo")
@click.option(
    "--folder",
    metavar="DIR",
    default="onceflow-demo",
    show_default=True,
    help="Where it plays. An earlier demo there is replaced; a folder of anything else is refused.",
)
@click.option("--seed", default=1, show_default=True, help="The same seed gives the same stream.")
@click.option(
    "--rate",
    type=click.IntRange(60, 100_000),
    default=2_000,
    show_default=True,
    help="How many events a second happen; some arrive more than once.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1),
    default=30.0,
    show_default=True,
    help="How long it goes on when all jobs have started, or longer if a kill is still to come.",
)
@click.option(
    "--kills",
    type=click.IntRange(0, 10),
    default=1,
    show_default=True,
    help="How often a job is killed: aggregation, attribution, load, and so on.",
)
@click.option(
    "--chaos", is_flag=True, help="Kill something every few seconds: jobs, parts of them, services."
)
@click.option("--keep", is_flag=True, help="Go on until Ctrl-C; then it is judged.")
@click.option(
    "--kafka", is_flag=True, help="With a Kafka broker and a PostgreSQL, which it starts and ends."
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    show_default="8765, or another that is free",
    help="Of the page, on this machine's loopback address.",
)
@click.option("--no-page", is_flag=True, help="Without the page.")
@json_option
def command(  # noqa: PLR0917 - one parameter for each option
    folder: str, seed: int, rate: int, seconds: float, kills: int, chaos: bool, keep: bool,
    kafka: bool, port: int | None, no_page: bool, as_json: bool,
) -> None:  # fmt: skip
    """Run the reference application, kill a job of it in the middle, and see what it counted.

    Ad impressions, clicks and orders of two regions, with duplicates, late events and broken
    lines, go through three jobs and a budget service while a page shows them. All processes of a
    job are killed (kill -9), and the same command is given again. Then the truth stands beside
    what every output holds.

    Exit code 0: lost 0, duplicated 0. 1: anything else. The folder stays, to look around in.
    """
    from onceflow.demo.play import Play, Script

    shown = screen(WORDS, as_json=as_json)
    script = Script(
        seed=seed, rate=rate, seconds=None if keep else seconds, kills=kills, chaos=chaos,
        kafka=kafka,
    )  # fmt: skip
    page = None
    if not no_page:
        from onceflow.page.server import Page

        page = partial(Page, port=port)
    play = Play(Path(folder), script, tell=shown.show, page=page)
    with shown_on(shown), _ctrl_c_judges(play) if keep else contextlib.nullcontext():
        verdict = play.perform()
        shown.show({"event": "next", "commands": next_commands(play.folder, kafka=kafka)})
    sys.exit(0 if verdict.exact else 1)


@contextlib.contextmanager
def _ctrl_c_judges(play: Play) -> Iterator[None]:
    """The first Ctrl-C ends the feeding, the second ends all."""

    def finish(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        play.finish()

    before = signal.signal(signal.SIGINT, finish)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def next_commands(folder: Path, *, kafka: bool = False) -> list[dict[str, str]]:
    """What to try in the folder of a demo, each command with what it shows."""
    first = [f"cd {shlex.quote(str(folder))}"]
    if shutil.which("onceflow") is None:
        first.append(f"source {shlex.quote(sys.prefix)}/bin/activate")
        if java := os.environ.get("JAVA_HOME"):
            first.append(f"export JAVA_HOME={shlex.quote(java)}")
    look = ["sqlite3", "serving.db", _LOOK]
    if shutil.which("sqlite3") is None:
        look = ["python", "-c", _LOOK_IN_PYTHON.format(_LOOK)]
    found = {
        **dict.fromkeys(first, ""),
        "onceflow serve --home home": "the page again",
        "onceflow status --home home": "where each query stands",
    }
    if not kafka:  # else the servers are gone, and what they held
        found |= {
            "onceflow ledger load --home home": "what each target itself says is published",
            "onceflow log tail counts/eu": "the counts that came last",
            shlex.join(look): "the clicks, as anybody reads them",
            "python -m ads check": "every output beside the truth, once more",
            "onceflow run ads/load.py --home home": "goes on where it stood; kill it as you like",
        }
    return [{"command": command, "shows": shows} for command, shows in found.items()]
