"""`python -m onceflow.cli.reference > docs/commands.md`: the commands' own help as a page."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator

import click

from onceflow import errors
from onceflow.cli import EXIT_CODES, cli

_HEAD = """\
# Commands

This page is the help of the commands, written by \
`python -m onceflow.cli.reference > docs/commands.md`. `onceflow COMMAND --help` shows the same in \
a terminal, without starting Spark.
"""
_ERRORS = """\
## Errors

An error is two lines on standard error: what is wrong, and how to fix it. With `--json` it is one \
object, on standard error; for `onceflow run` it is the last event on standard output.

```json
{"event": "error", "kind": "LeaseHeld", "message": "job word-count is led by process …", \
"hint": "stop it there, or …", "exit_code": 5, "retryable": false}
```

`kind` is one of the classes below, or `JvmDied`, `DriverDied`, `UserCodeError`, or the class that \
Spark or a library raised. `retryable`: starting the job again can help; `onceflow run` has then \
already tried. Events of `onceflow run` also have `at`, and `away` if a server does not answer.
"""


def page() -> str:
    context = click.Context(cli, info_name="onceflow")
    names = cli.list_commands(context)
    commands = [(name, cli.get_command(context, name)) for name in names]
    index = [
        f"| [`{name}`](#onceflow-{name}) | {_summary(command)} |"
        for name, command in commands
        if command is not None
    ]
    codes = [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()]
    parts = [
        _HEAD,
        "\n".join(["| command | |", "|---|---|", *index]) + "\n",
        _text(cli.help or "") + "\n",
    ]
    for name, command in commands:
        if command is not None:
            parts += _section(command, context, name, "##")
    parts += ["## Exit codes\n", "\n".join(["| code | meaning |", "|---|---|", *codes]) + "\n"]
    return "\n".join([*parts, _ERRORS, _errors()])


def _errors() -> str:
    """The tree in the docstring of `onceflow.errors`, as a table."""
    rows = []
    for name, meaning in re.findall(r"── (\w+) +(.*)", errors.__doc__ or ""):
        kind = getattr(errors, name)
        rows.append(
            f"| `{name}` | {kind.exit_code} | {'yes' if kind.retryable else ''} | {meaning} |"
        )
    return "\n".join(["| kind | exit code | retryable | |", "|---|---|---|---|", *rows]) + "\n"


def _summary(command: click.Command) -> str:
    return (command.help or "").partition("\n")[0]


def _section(command: click.Command, parent: click.Context, name: str, level: str) -> Iterator[str]:
    context = click.Context(command, parent=parent, info_name=name)
    yield f"{level} {context.command_path}\n"
    if not isinstance(command, click.Group):
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"```\n{usage}\n```\n"
    yield _text(command.help or "") + "\n"
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            assert found is not None
            yield from _section(found, context, inner, level + "#")
        return
    rows = []
    for option in command.params:
        record = option.get_help_record(context) if isinstance(option, click.Option) else None
        if record is not None:
            said = re.sub(r"\[default: \((.*)\)([;\]])", r"[default: \1\2", record[1])
            rows.append(f"| `{_cell(record[0])}` | {_cell(said)} |")
    yield "\n".join(["| option | |", "|---|---|", *rows]) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _text(help_: str) -> str:
    """Paragraphs, and blocks that click is told not to wrap."""
    blocks = []
    for block in inspect.cleandoc(help_).split("\n\n"):
        if block.startswith("\b\n"):
            blocks.append(f"```\n{block[2:]}\n```")
        else:
            text = " ".join(block.split())
            blocks.append(re.sub(r"\bdocs/([\w-]+\.md)", r"[\1](\1)", text))
    return "\n\n".join(blocks)


if __name__ == "__main__":
    sys.stdout.write(page())
