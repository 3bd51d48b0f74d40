"""The command line: thin over the library, every command with `--json` and exit codes.

| code | meaning |
|---|---|
| 0 | done, or stopped at an epoch's end |
| 1 | failed: code of the job raised, the demo's result is not the truth, the verdict is invalid |
| 2 | the command, the job or the session is wrong |
| 3 | the verdict is unknown |
| 4 | Java, Spark or the machine is not what is needed |
| 5 | another driver leads the job |
| 6 | fenced by another driver |
| 7 | a file of onceflow's, or the checkpoint, is damaged or not the right one |
| 8 | a target cannot take the output |
| 9 | rows that cannot be parsed or taken |
| 75 | trying again later can help (a full disk, a locked database) |
| 128 + n | the driver was ended by signal n, and starting it again did not help |
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click

from onceflow.errors import JobError, OnceflowError, SetupError
from onceflow.store.version import __version__

_COMMANDS = {
    "run": "Run a job, with progress; exactly once, whatever happens.",
    "demo": "A job that is killed in the middle, and the truth beside its result.",
    "verify": "Break a job in every way we know, and count.",
    "status": "Where each query of a job stands.",
    "ledger": "What each target itself says is published.",
    "stop": "Stop a job at an epoch's end, from another terminal or machine.",
    "savepoint": "Name the state of a job: create, list, show, verify, delete.",
    "restore": "Go on from a savepoint, in a new lineage.",
    "rollback": "Go back to a retained epoch.",
    "fork": "A second job from the same cut, with outputs of its own.",
    "lineages": "The tree of a job's lineages: where each comes from, and why.",
    "epoch": "One epoch in detail: what went in, what came out, and the decision.",
    "state": "The state of a job, of any retained epoch: list, show, export, import.",
    "kafka": "What a job left open in a Kafka broker.",
    "log": "The embedded log: create, append, tail, info, trim.",
    "serve": "The page: what the jobs of a home do, live; an API and metrics.",
    "doctor": "Java, Spark, disk, clock, leftovers: what is wrong and what mends it.",
}

_MODULES = {"rollback": "restore"}  # command -> where it is, if not in a module of its name


class _Lazy(click.Group):
    """Imports a command when it is called, so that help is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"onceflow.cli.{_MODULES.get(name, name)}")
        command: click.Command = getattr(module, name if name in _MODULES else "command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="onceflow")
def cli() -> None:
    """Exactly-once stream processing for Python, on Spark: not less, not more."""


def main() -> None:
    """Entry point: errors become a message and an exit code, as JSON if that was asked for."""
    if sys.argv[1:3] == ["savepoint", "create"]:  # reads gigabytes beside a job that goes on
        os.nice(19)
    try:
        cli(standalone_mode=False)
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.ClickException as error:
        if not _wants_json():
            error.show()
            sys.exit(error.exit_code)
        _fail(JobError(error.format_message(), hint="onceflow --help names commands and options"))
    except click.Abort:
        sys.exit(130)
    except OnceflowError as error:
        _fail(error)
    except OSError as error:
        _fail(SetupError(str(error), hint="look at the path and at who may read and write it"))


def _wants_json() -> bool:
    return "--json" in sys.argv


def _fail(error: OnceflowError) -> NoReturn:
    from onceflow.cli.display import show_error

    show_error(error, as_json=_wants_json())
    sys.exit(error.exit_code)
