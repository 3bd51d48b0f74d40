"""The command line: thin over the library, a module for each command.

Lives here: options, help, what commands print, exit codes. May not live here: what a program
without a terminal would need too. Start reading in `status.py`, then `display.py`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click

from onceflow.errors import JobError, OnceflowError, SetupError
from onceflow.store.version import __version__

EXIT_CODES = {
    "0": "done, or stopped at the end of an epoch",
    "1": "code of the job raised; demo: the outputs are wrong; verify: invalid",
    "2": "the command, the job or the Spark session is wrong",
    "3": "verify: unknown, because a check could not be made",
    "4": "Java, Spark or the machine is not what the job needs",
    "5": "another driver leads the job",
    "6": "a newer driver has replaced this one",
    "7": "a file of onceflow or Spark's checkpoint is damaged, or is not the right one",
    "8": "a target cannot take the output",
    "9": "rows cannot be read or taken",
    "75": "trying again later can help: a full disk, a locked database, a job still stopping",
    "130": "interrupted before the command began",
    "128 + N": "ended by signal N (137: killed; 141: nobody reads the output any longer)",
}

# Each command and the first sentence of its help, so that the list imports no command.
_COMMANDS = {
    "run": "Run a job, and start it again when it fails and a retry can help.",
    "demo": "Run the example application, kill a job of it, and check every output.",
    "verify": "Run a job while faults strike, and compare its outputs with the expected result.",
    "status": "Show where each query of a job stands.",
    "ledger": "Show what each target says is published.",
    "stop": "Stop a running job at the end of its epoch, and wait for that.",
    "savepoint": "Create, list, show, verify and delete savepoints.",
    "restore": "Continue a job from a savepoint, in a new lineage.",
    "rollback": "Continue a job from a retained epoch, in a new lineage.",
    "fork": "Make a second job that starts with the state of a job and has its own outputs.",
    "lineages": "Show the lineages of a job as a tree.",
    "epoch": "Show what one epoch read and wrote.",
    "state": "List, show, export and import the state of a job.",
    "kafka": "Show and end the transactions that a job left open in Kafka.",
    "log": "Create, fill, read and trim logs, which need no server.",
    "serve": "Serve the page of a home, its API and its metrics.",
    "doctor": "Check Java, Spark, disks and clocks, and say how to fix what is wrong.",
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

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl(list(EXIT_CODES.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="onceflow", help="Show the version.")
def cli() -> None:
    """Exactly-once stream processing for Python on Spark.

    With --json a command writes JSON to standard output and nothing else. An error is two lines on
    standard error, or with --json one object: what is wrong, and how to fix it.
    """


def main() -> None:
    """Entry point: an error becomes a message and an exit code, as JSON if that was asked for."""
    if sys.argv[1:3] == ["savepoint", "create"]:  # reads gigabytes beside a job that runs
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
        _fail(SetupError(str(error), hint="check the path and who may read and write it"))


def _wants_json() -> bool:
    return "--json" in sys.argv


def _fail(error: OnceflowError) -> NoReturn:
    from onceflow.cli.display import show_error

    show_error(error, as_json=_wants_json())
    sys.exit(error.exit_code)
