"""`python -m examples.ads verify`"""

from __future__ import annotations

import os
import shlex
from typing import Any

import click

from onceflow.errors import JobError

_FAULTS = 20


@click.command("verify")
@click.option("--seed", default=1, show_default=True, help="The same seed gives the same schedule.")
@click.option(
    "--faults",
    type=click.IntRange(min=1),
    default=_FAULTS,
    show_default=True,
    help="How many faults strike.",
)
@click.option("--fault", "kinds", metavar="KIND", multiple=True, help="Only faults of this kind.")
@click.option("--at", "points", metavar="POINT", multiple=True, help="Only at this fault point.")
@click.option("--report", metavar="FILE.html", help="Write a report as one HTML file.")
@click.option("--keep", metavar="FOLDER", help="Run there, and keep all that was written.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
def command(
    *,
    seed: int,
    faults: int,
    kinds: tuple[str, ...],
    points: tuple[str, ...],
    report: str | None,
    keep: str | None,
    as_json: bool,
) -> None:
    """Break the whole application while it runs, and check every output.

    All three jobs and both services run at the same time, embedded, while drivers are killed,
    frozen and replaced, files are lost and damaged, tasks fail, jobs go back to earlier epochs, and
    the services are killed. Then every output is compared with the expected result of the
    generator, and every charge with the committed clicks.

    Exit code 0: valid. 1: invalid. 3: unknown, because a check could not be made.
    """
    from ads.verify import plan, services
    from ads.verify.trial import Settings, Trial
    from onceflow.cli.verify import run_and_report

    known = [*plan.KINDS, *services.KINDS]
    for kind in kinds:
        if kind not in known:
            raise JobError(f"--fault: there is no {kind!r}", hint=f"use {', '.join(known)}")
    for name in ("ADS_KAFKA", "ADS_POSTGRES_FILE"):
        if name in os.environ:
            raise JobError(f"{name} is set, and this runs embedded", hint=f"unset {name}")
    again = _again(seed=seed, faults=faults, fault=kinds, at=points)
    run_and_report(
        lambda folder, tell: Trial(Settings(folder, seed, faults, kinds, points, again), tell),
        report=report, keep=keep, as_json=as_json,
    )  # fmt: skip


def _again(**options: Any) -> str:
    words = ["python", "-m", "examples.ads", "verify"]
    for name, value in options.items():
        for one in value if isinstance(value, tuple) else (value,):
            words += [f"--{name}", str(one)]
    return shlex.join(words)
