"""`onceflow doctor`"""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from onceflow.cli.display import home_option, json_option, paint, show
from onceflow.service.checkup import Finding, examine


@click.command("doctor")
@home_option
@json_option
def command(home: str, as_json: bool) -> None:
    """Check Java, Spark, disks and clocks, and say how to fix what is wrong.

    It also checks Python, jars, Maven, the Kafka connector, folders that killed JVMs left, and
    each job of the home.

    With --json: a list with an object for each check: what, state (ok, warning or wrong), says,
    fix. Exit codes: 0 nothing is wrong, though there may be warnings; 4 something is.

    \b
    onceflow doctor
    """
    found = list(examine(home))
    show([asdict(f) for f in found], as_json=as_json, text=lambda _: _text(found))
    sys.exit(4 if any(f.state == "wrong" for f in found) else 0)


def _text(found: list[Finding]) -> str:
    width = max(len(f.what) for f in found)
    lines = []
    for f in found:
        lines.append(f"{paint(f.state.ljust(7), f.state)}  {f.what.ljust(width)}  {f.says}")
        if f.fix:
            lines.append(f"{'':<7}  {'':<{width}}  {paint('fix:', 'fix')} {f.fix}")
    return "\n".join(lines)
