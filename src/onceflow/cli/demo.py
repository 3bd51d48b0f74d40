"""`onceflow demo`"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import click

from onceflow.cli.demo_screen import WORDS
from onceflow.cli.output import json_option
from onceflow.cli.telling import screen, shown_on

_ONCEFLOW = [sys.executable, "-c", "from onceflow.cli import main; main()"]
_LOOK = "SELECT minute, ad, kind, count FROM counts ORDER BY 1, 2, 3 LIMIT 5"
_LOOK_IN_PYTHON = (
    "import sqlite3; print(*sqlite3.connect('out/counts.db').execute('{}'), sep='\\n')"
)


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
    "--events",
    type=click.IntRange(min=1000),
    default=60_000,
    show_default=True,
    help="How many events happen; some arrive more than once.",
)
@click.option(
    "--kills",
    type=click.IntRange(0, 10),
    default=1,
    show_default=True,
    help="How often the job is killed.",
)
@json_option
def command(folder: str, seed: int, events: int, kills: int, as_json: bool) -> None:
    """Kill a job in the middle of an epoch, start it again, and see what it counted.

    A stream of ad impressions and clicks, with duplicates, late events and broken lines, is
    appended to a log while the job runs. All its processes are killed (kill -9), and the same
    command is given again. Then the truth stands beside what the job's two targets hold.

    Exit code 0: lost 0, duplicated 0. 1: anything else. The folder stays, to look around in.
    """
    from onceflow.demo.play import Play
    from onceflow.demo.stream import Stream

    shown = screen(WORDS, as_json=as_json)
    stream = Stream(seed=seed, events=events)
    play = Play(Path(folder), stream, kills=kills, onceflow=_ONCEFLOW, tell=shown.show)
    with shown_on(shown):
        verdict = play.perform()
        shown.show({"event": "next", "commands": next_commands(play.folder)})
    sys.exit(0 if verdict.exact else 1)


def next_commands(folder: Path) -> list[dict[str, str]]:
    """What to try in the folder of a demo, each command with what it shows."""
    first = [f"cd {shlex.quote(str(folder))}"]
    if shutil.which("onceflow") is None:
        first.append(f"source {shlex.quote(sys.prefix)}/bin/activate")
        if java := os.environ.get("JAVA_HOME"):
            first.append(f"export JAVA_HOME={shlex.quote(java)}")
    look = ["sqlite3", "out/counts.db", _LOOK]
    if shutil.which("sqlite3") is None:
        look = ["python", "-c", _LOOK_IN_PYTHON.format(_LOOK)]
    found = {
        **dict.fromkeys(first, ""),
        "onceflow status --home home": "where each query stands",
        "onceflow ledger ads --home home": "what each target itself says is published",
        "onceflow log tail events": "the rows that came last",
        shlex.join(look): "the counts, as anybody reads them",
        "onceflow run ads.py --home home": "goes on where it stood; kill it as you like",
    }
    return [{"command": command, "shows": shows} for command, shows in found.items()]
