"""`python -m onceflow.spark.jars NAME…`: prints a folder for each, with the jars in it."""

from __future__ import annotations

import sys

import click

from onceflow.errors import SetupError
from onceflow.spark import jars


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(jars.NAMES))
def command(names: tuple[str, ...]) -> None:
    """Print the folder of each, and download the jars first if they are missing."""
    try:
        for name in names:
            click.echo(jars.fetch(name))
    except SetupError as error:
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    command()
