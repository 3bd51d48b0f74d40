"""`onceflow verify`"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onceflow.cli.display import Event, Report, display, json_option, paint, shown_on
from onceflow.contract.ledger import Guarantee
from onceflow.errors import JobError
from onceflow.protocol.home import DEFAULT_HOME
from onceflow.service.number_format import number

if TYPE_CHECKING:
    from onceflow.harness.fault_run import FaultRun
    from onceflow.harness.run_record import RunRecord
    from onceflow.harness.verification import Settings

_FAULTS = 40
_LONG = 300
_MOST_VIOLATIONS = 20
_COLOURS = {"valid": "ok", "invalid": "wrong", "unknown": "warning"}


@click.command("verify")
@click.argument("job", metavar="[JOB.py[:name]]", required=False)
@click.option(
    "--seed",
    metavar="N",
    default=1,
    show_default=True,
    help="The same seed gives the same schedule.",
)
@click.option(
    "--faults",
    metavar="N",
    type=click.IntRange(min=1),
    show_default=f"{_FAULTS}, or one a second of --duration",
    help="The number of faults.",
)
@click.option(
    "--part", metavar="K/N", default="1/1", help="Run only every Nth case, from the Kth on."
)
@click.option(
    "--duration", metavar="TIME", help='The time in which faults strike, such as "10 min".'
)
@click.option(
    "--fault",
    "kinds",
    metavar="KIND",
    multiple=True,
    help="Only faults of this kind; may be given several times. snapshots stands for savepoint, "
    "rollback, restore and fork.",
)
@click.option(
    "--at",
    "points",
    metavar="POINT",
    multiple=True,
    help="Only at this fault point; may be given several times.",
)
@click.option(
    "--jobs", metavar="NAMES", default="", help="Only these built-in jobs, such as echo,sum."
)
@click.option(
    "--sinks",
    metavar="NAMES",
    default="",
    help="Only these sinks, of files,sqlite,log,kafka,postgres. A server is started for the last "
    "two, unless $ONCEFLOW_KAFKA or $ONCEFLOW_POSTGRES names one.",
)
@click.option(
    "--guarantee",
    type=click.Choice([guarantee.value for guarantee in Guarantee]),
    help="The guarantee of the outputs of the built-in jobs. What it allows is counted, and is not "
    "a violation.",
)
@click.option(
    "--input",
    "recorded",
    metavar="LOG",
    help="A recorded log as the input of JOB.py, in place of its workload.",
)
@click.option(
    "--master",
    type=click.Choice(["local", "cluster"]),
    default="local",
    show_default=True,
    help="cluster: start a standalone cluster for the run.",
)
@click.option(
    "--brokers",
    metavar="N",
    type=click.IntRange(1, 3),
    show_default=f"1, or 3 from {_LONG} faults on",
    help="The number of Kafka brokers to start.",
)
@click.option(
    "--report", metavar="FILE.html", help="Write a report, one file without links to others."
)
@click.option("--keep", metavar="FOLDER", help="Run in this folder, new or empty, and keep it.")
@click.option(
    "--record",
    metavar="DIR",
    default=lambda: str(Path(os.environ.get("ONCEFLOW_HOME") or DEFAULT_HOME) / "_verify"),
    show_default=f"_verify in $ONCEFLOW_HOME or {DEFAULT_HOME}",
    help="Keep events, result and report of the last 100 runs there, for the page.",
)
@click.option("--no-record", is_flag=True, help="Keep nothing for the page.")
@json_option
def command(
    *, report: str | None, keep: str | None, record: str, no_record: bool, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Run a job while faults strike, and compare its outputs with the expected result.

    Without JOB.py the built-in jobs run. Each reads numbered rows while its driver is killed,
    frozen and replaced, its files are lost and damaged, and its tasks fail. Then the rows in its
    targets are compared with the expected ones. docs/verify.md lists the faults and the checks.

    With --json: one event a line (docs/events.md). Exit codes: 0 valid; 1 invalid; 3 unknown,
    because a check could not be made; 130 interrupted.

    \b
    onceflow verify --report proof.html
    onceflow verify job.py --faults 10
    """
    from onceflow.harness.run_record import RunRecord
    from onceflow.harness.verification import Verification

    kept = None if no_record else RunRecord(Path(record).absolute(), _command())

    def make(folder: Path, tell: Callable[[Event], None]) -> FaultRun:
        return Verification(_settings(folder, **options), tell)

    run_and_report(make, report=report, keep=keep, record=kept, as_json=as_json)


def run_and_report(
    make: Callable[[Path, Callable[[Event], None]], FaultRun], *, report: str | None,
    keep: str | None, record: RunRecord | None = None, as_json: bool,
) -> None:  # fmt: skip
    """Make a run of a folder and of a function for its events; run it, and exit by its verdict."""
    if report is not None and not Path(report).absolute().parent.is_dir():
        raise JobError(f"there is no folder for {report}", hint="create it, or name another file")
    shown = display(VerifyReport(), as_json=as_json)
    folder = Path(keep or tempfile.mkdtemp(prefix="onceflow-verify-")).absolute()

    def tell(event: Event) -> None:
        if record is not None:
            record.take(event)
        shown.show(event)

    with shown_on(shown):
        try:
            result = make(folder, tell).run()
            said = result.as_json()
            if record is not None:
                record.ended(said)
            if report is not None:
                from onceflow.harness.report import html

                Path(report).write_text(html(said))
                shown.show({"event": "report", "path": report})
            if keep is not None:
                (folder / "result.json").write_text(json.dumps(said, indent=1) + "\n")
        finally:
            if keep is None:
                shutil.rmtree(folder, ignore_errors=True)
    sys.exit(130 if result.interrupted else result.exit_code)


def _settings(
    folder: Path, *, job: str | None, seed: int, faults: int | None, part: str,
    duration: str | None, kinds: tuple[str, ...], points: tuple[str, ...], jobs: str, sinks: str,
    guarantee: str | None, recorded: str | None, master: str, brokers: int | None,
) -> Settings:  # fmt: skip
    from onceflow.contract.quantities import milliseconds
    from onceflow.faults.points import KEYED, POINTS, SERVICES, TASK
    from onceflow.faults.points import SNAPSHOTS as STEPS
    from onceflow.harness.builtin_catalog import JOBS, SERVER_SINKS, SINKS, cases
    from onceflow.harness.fault_schedule import KINDS, SNAPSHOTS
    from onceflow.harness.verification import Settings

    seconds = None if duration is None else milliseconds(duration) / 1000
    faults = faults or (_FAULTS if seconds is None else max(1, round(seconds)))
    names, places = _names(jobs), _names(sinks)
    _refuse_unknown("--fault", kinds, [*KINDS, "snapshots"])
    _refuse_unknown("--at", points, [*POINTS, *KEYED, *TASK, *SERVICES, *STEPS])
    if "snapshots" in kinds:
        kinds = (*(kind for kind in kinds if kind != "snapshots"), *SNAPSHOTS)
    _refuse_unknown("--jobs", names, list(JOBS))
    _refuse_unknown("--sinks", places, [*SINKS, *SERVER_SINKS])
    if job is not None and (names or places or guarantee):
        raise JobError(
            "--jobs, --sinks and --guarantee are for the built-in jobs", hint="leave them out"
        )
    if job is None and recorded is not None:
        raise JobError("--input needs a job file", hint="onceflow verify JOB.py --input LOG")
    chosen = cases(faults, names, places) if job is None else []
    if job is None and not chosen:
        asked = sinks or ",".join(SINKS)
        known = ",".join((*SINKS, *SERVER_SINKS))
        raise JobError(f"no job of {jobs} writes to {asked}", hint=f"use --sinks, of {known}")
    return Settings(
        folder=folder,
        seed=seed,
        faults=faults,
        kinds=kinds or tuple(KINDS),
        points=points,
        cases=tuple(chosen),
        part=_part(part, len(chosen) or 1),
        duration=seconds,
        master=master,
        command=_command(),
        job=job,
        recorded=recorded,
        guarantee=guarantee or "",
        brokers=brokers or (3 if faults >= _LONG else 1),
    )


def _command() -> str:
    """The command that repeats this run, without the options for its results."""
    given, kept = iter(sys.argv[1:]), []
    for argument in given:
        name = argument.partition("=")[0]
        if name in ("--report", "--keep", "--record"):
            if "=" not in argument:
                next(given, None)
        elif argument not in ("--json", "--no-record"):
            kept.append(argument)
    return shlex.join(["onceflow", *kept])


def _part(text: str, cases: int) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if found is None or not int(found[1]) <= int(found[2]) <= cases:
        raise JobError(
            f"--part: {text!r} is not a part of {cases} cases", hint=f"1/{cases} to {cases}/{cases}"
        )
    return int(found[1]), int(found[2])


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _refuse_unknown(option: str, names: tuple[str, ...], known: list[str]) -> None:
    for name in names:
        if name not in known:
            raise JobError(f"{option}: {name!r} is unknown", hint=f"use {', '.join(known)}")


# ---------------------------------------------------------------- what happens


class VerifyReport(Report):
    news_every = 10.0

    def lines(self, event: Event) -> list[str]:
        match event["event"]:
            case "progress":
                return [f"{_stamp(event)}  {_how_it_goes(event)}"]
            case "begin":
                cases = number(len(event["cases"]), "cases")
                return [
                    f"{number(event['faults'], 'faults')} over {cases} (seed {event['seed']})",
                    f"folder {event['folder']}",
                    *(f"left out: {what}" for what in event["left_out"]),
                ]
            case "case":
                return [f"{_stamp(event)}  {event['job']} to {event['sinks']}"]
            case "truth":
                return [f"{_stamp(event)}  {event['says']}"]
            case "fault":
                return [f"{_stamp(event)}    {event['number'] + 1:3d}  {event['what']}"]
            case "case-ended":
                return _case_ended(event)
            case "verdict":
                return _verdict(event)
            case "report":
                return [f"report {event['path']}"]
        return []


def _stamp(event: Event) -> str:
    return f"{event['at_s']:6.1f} s"


def _how_it_goes(event: Event) -> str:
    return (
        f"{event['job']} to {event['sinks']}: "
        f"{event['faults']} of {number(event['of'], 'faults')}, "
        f"{event['rows_in']:,} rows in, {event['rows_out']:,} out, lag {event['lag']:,}, "
        f"violations {event['violations']}"
    )


def _case_ended(event: Event) -> list[str]:
    says = (
        f"{number(event['rows_in'], 'rows')} in, {number(event['rows_out'], 'rows')} out, "
        f"{number(event['epochs'], 'epochs')}"
    )
    lines = [f"{_stamp(event)}    {says}"]
    lines += [f"          {paint(text, 'wrong')}" for text in event["violations"]]
    if event["unknown"]:
        lines.append(f"          {paint('unknown: ' + event['unknown'], 'warning')}")
    return lines


def _verdict(event: Event) -> list[str]:
    verdict = paint(event["verdict"], _COLOURS[event["verdict"]])
    took = f"{event['seconds']:.0f} s"
    lines = [
        "",
        f"{verdict}: {number(event['struck'], 'faults')} struck "
        f"({number(event['kills'], 'kills')}) in {took}, "
        f"{number(len(event['violations']), 'violations')}",
    ]
    if event["recovery_s"]:
        times = ", ".join(f"{name} {value:.1f} s" for name, value in event["recovery_s"].items())
        lines.append(f"from a fault to the next epoch, without Spark's start: {times}")
    lines += [f"  allowed by its guarantee: {_said(allowed)}" for allowed in event["allowed"]]
    lines += [f"  {_said(violation)}" for violation in event["violations"][:_MOST_VIOLATIONS]]
    more = len(event["violations"]) - _MOST_VIOLATIONS
    lines += [f"  and {more} more"] if more > 0 else []
    lines += [f"  unknown: {why}" for why in event["unknown"]]
    return [*lines, f"to repeat it: {event['command']}"]


def _said(violation: Event) -> str:
    return f"{violation['kind']}: {violation['where']}: {violation['message']}"
