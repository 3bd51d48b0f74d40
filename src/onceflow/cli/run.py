"""`onceflow run`"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import click

from onceflow.cli.output import home_option, json_option, paint
from onceflow.cli.screen import screen_for
from onceflow.errors import JobError
from onceflow.protocol.home import now
from onceflow.service.supervisor import Supervisor


@click.command("run")
@click.argument("job", metavar="JOB.py[:name]")
@home_option
@click.option("--as", "fork", metavar="NAME", help="Run a fork of the job: see onceflow fork.")
@click.option("--once", is_flag=True, help="Stop when the input is used up.")
@click.option(
    "--master",
    metavar="URL",
    show_default="$SPARK_MASTER or local[*]",
    help="Spark master, such as local[4] or spark://host:7077.",
)
@click.option(
    "--every",
    metavar="TIME",
    help='How often an epoch begins, such as "500ms"; else what the job says.',
)
@click.option("--take-over", is_flag=True, help="End the driver that leads now, and replace it.")
@click.option("--page", is_flag=True, help="Serve the page of the home while it runs.")
@click.option(
    "--token-file",
    metavar="FILE",
    help="The token of the page is the text of this file; else one is made and printed.",
)
@json_option
def command(  # noqa: PLR0917 - one parameter for each option
    job: str, home: str, fork: str | None, once: bool, master: str | None, every: str | None,
    take_over: bool, page: bool, token_file: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Run a job. It is started again when it fails and that can help; SIGINT (Ctrl-C) and SIGTERM
    stop it at an epoch's end. Kill it as you like: the next run goes on exactly where it stood.
    A server that is away (Kafka, PostgreSQL, the Spark master) is waited for, but not with --once.

    JOB.py is a file with a function that is decorated with @job; if it has several, :name says
    which. --json writes one event a line.
    """
    arguments = [job]
    named = (("--home", home), ("--as", fork), ("--master", master), ("--every", every))
    for option, value in named:
        arguments += [f"{option}={value}"] if value is not None else []
    arguments += ["--once"] if once else []
    arguments += ["--take-over"] if take_over else []
    if token_file is not None and not page:
        raise JobError("--token-file is for the page", hint="add --page, or leave it out")
    with _page(home, token_file, as_json=as_json) if page else nullcontext():
        code = Supervisor(arguments, screen_for(as_json=as_json)).run()
    sys.exit(code)


@contextmanager
def _page(home: str, token_file: str | None, *, as_json: bool) -> Iterator[None]:
    """In a thread: the job has a process of its own, which it does not slow."""
    from onceflow.page.access import token_in
    from onceflow.page.server import Page

    token, warning = (None, None) if token_file is None else token_in(token_file)
    if warning:
        click.echo(paint("warning: ", "warning") + warning, err=True)
    with Page(home, token=token) as page:
        made = page.token if token_file is None else None
        if as_json:
            event = {"event": "page", "at": now(), "url": page.url, "token": made}
            click.echo(json.dumps(event))
        else:
            click.echo(f"page: {page.url}")
            if made is not None:
                click.echo(f"token: {made}")
        yield
