"""`onceflow serve`"""

from __future__ import annotations

import json
import signal
import sys

import click

from onceflow.cli.display import home_option, json_option, show_warning
from onceflow.errors import JobError


@click.command("serve")
@home_option
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="The address to listen on. Put a proxy with TLS in front of any but 127.0.0.1.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65535),
    show_default="8765, or a free one if that is taken",
    help="The port; 0: any free one.",
)
@click.option(
    "--token-file",
    metavar="FILE",
    help="A file with the token that actions need (16 characters or more); by default a token is "
    "made and printed.",
)
@click.option("--read-only", is_flag=True, help="Allow no action; there is no token.")
@click.option(
    "--allow-host",
    "allow_hosts",
    metavar="NAME",
    multiple=True,
    help="A host name under which a proxy serves it; may be given several times.",
)
@json_option
def command(  # noqa: PLR0917 - one parameter for each option
    home: str, host: str, port: int | None, token_file: str | None, read_only: bool,
    allow_hosts: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Serve the page of a home, its API and its metrics.

    It reads the files of the home and talks with no job, so it may be started and ended at any
    time. Reading needs no token; taking a savepoint through the page does. SIGINT (Ctrl-C) and
    SIGTERM end it, with exit code 0. docs/page.md describes the page, docs/metrics.md the metrics.

    With --json: one line with url, home, token, read_only.

    \b
    onceflow serve --home .onceflow --port 8765
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
        show_warning(warning)
    if not is_loopback(host):
        open_to = (
            f"{host} can be reached from other machines, without encryption: put a proxy with TLS "
            "in front of it, and decide who may read"
        )
        show_warning(open_to)
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
        click.echo("port 8765 is taken; using a free one")
    click.echo(f"page: {url} of home {home} (Ctrl-C ends it)")
