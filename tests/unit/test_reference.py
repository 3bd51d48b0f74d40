"""The help of every command, and the page that is made of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from onceflow import errors
from onceflow.cli import _COMMANDS, EXIT_CODES, cli
from onceflow.cli.reference import page

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for inner in group.list_commands(context):
        command = group.get_command(context, inner)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{name} {inner}")
        else:
            yield f"{name} {inner}", command


EACH = dict(commands(cli, "onceflow"))


def test_the_page_is_what_the_commands_say() -> None:
    fix = "python -m onceflow.cli.reference > docs/commands.md"
    assert PAGE.read_text() == page(), f"the help of a command has changed: {fix}"


@pytest.mark.parametrize("name", EACH)
def test_help_has_an_example_the_fields_of_json_and_every_option(name: str) -> None:
    command, text = EACH[name], page()
    assert command.help
    assert re.search(rf"^    (.* \\| )?{name}", command.help, re.MULTILINE), "there is no example"
    assert "With --json: " in command.help
    section = re.split(r"\n##+ ", text.partition(f"# {name}\n")[2])[0]
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help, f"{option.opts} has no help"
            assert option.opts[0] in section
    assert any("--json" in option.opts for option in command.params)


def test_a_list_of_the_commands_has_the_first_sentence_of_their_help() -> None:
    context = click.Context(cli)
    for name, summary in _COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert (command.help or "").partition("\n")[0] == summary


def test_every_error_and_its_exit_code_is_in_the_page() -> None:
    kinds, text = [errors.OnceflowError], page()
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in {kind for kind in kinds[1:] if kind.__module__ == errors.__name__}:
        assert f"| `{kind.__name__}` | {kind.exit_code} |" in text
        assert str(kind.exit_code) in EXIT_CODES
