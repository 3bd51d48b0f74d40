"""`onceflow serve`"""

from __future__ import annotations

import json
import signal
import sys

import click

from onceflow.cli.display import home_option, json_option, paint
from onceflow.errors import JobError


@click.command("serve")
@home_option
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Where it listens. Any other than this machine's own needs TLS in front of it.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    show_default="8765, or a free one if that is taken",
    help="0: any free one.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    help="The token that actions need is the text of this file; else one is made and printed.",
)
@click.option("--read-only", is_flag=True, help="No action can be taken through it; no token.")
@click.option(
    "--allow-host",
    "allow_hosts",
    metavar="NAME",
    multiple=True,
    help="A name under which a proxy serves it; may be given several times.",
)
@json_option
def command(  # noqa: PLR0917 - one parameter for each option
    home: str, host: str, port: int | None, token_file: str | None, read_only: bool,
    allow_hosts: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """The page: what the jobs of a home do, live, for people; an API and metrics for programs.

    It reads the home and never a running job, so jobs need not know of it. Reading needs no token;
    taking a savepoint through it does. SIGINT (Ctrl-C) and SIGTERM end it.
    """
    from onceflow.page.access import token_in
    from onceflow.page.guard import is_loopback
    from onceflow.page.server import Page

    if read_only and token_file is not None:
        raise JobError("--read-only has no token", hint="leave out --token-file")
    token, warning = (None, None) if token_file is None else token_in(token_file)
    page = Page(
        home,
        host=host,
        port=port,
        token=token,
        read_only=read_only,
        allow_hosts=allow_hosts,
        log_level="error",
    )
    if warning:
        click.echo(paint("warning: ", "warning") + warning, err=True)
    if not is_loopback(host):
        open_to = (
            f"{host} can be reached from other machines, and what is sent is not encrypted: put a "
            "proxy with TLS in front of it, and think of who may read"
        )
        click.echo(paint("warning: ", "warning") + open_to, err=True)
    made = page.token if token_file is None else None
    if as_json:
        event = {"event": "serving", "url": page.url, "home": home, "token": made,
                 "read_only": read_only}  # fmt: skip
        click.echo(json.dumps(event))
    else:
        _say(page.url, home, moved=page.moved)
        if made is not None:
            click.echo(f"token: {made}")
    sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: page.stop())
    page.serve()


def _say(url: str, home: str, *, moved: bool) -> None:
    if moved:
        click.echo("port 8765 is taken, so a free one is used")
    click.echo(f"page: {url} of home {home} (Ctrl-C ends it)")
