"""python -m model, in the folder tests: explore the protocol, follow a trace, or print a page."""

from __future__ import annotations

import argparse
import sys
import time
from itertools import groupby
from pathlib import Path

from model.explained import page
from model.explorer import explore
from model.invariants import RULES, Onceflow
from model.steps import Mutant, Settings
from model.traces import accept


def main() -> int:
    options = _options()
    if options.snapshots_page:
        return _say(page())
    if options.trace:
        refusal = accept(Path(options.trace).read_text().splitlines())
        return _say(str(refusal), 1) if refusal else _say("the model allows this trace")
    return _explore(
        Settings(
            drivers=options.drivers,
            rows=options.rows,
            no_data=options.no_data,
            mutant=Mutant(options.mutant) if options.mutant else None,
        )
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m model", description=__doc__)
    parser.add_argument("--drivers", type=int, default=2, help="at the same time (2)")
    parser.add_argument("--rows", type=int, default=3, help="of input: as many epochs (3)")
    parser.add_argument("--no-data", action="store_true", help="also epochs without data")
    parser.add_argument("--mutant", choices=[m.value for m in Mutant], help="turn one rule off")
    parser.add_argument("--trace", metavar="FILE", help="does the model allow this trace?")
    parser.add_argument("--snapshots-page", action="store_true", help="docs/snapshots-explained.md")
    return parser.parse_args()


def _explore(settings: Settings) -> int:
    began = time.process_time()
    found = explore(Onceflow(settings))
    _say(
        f"{settings.drivers} drivers, {settings.epochs} epochs, {len(settings.outputs)} outputs: "
        f"{found.states:,} states, {found.transitions:,} transitions, {found.worlds:,} worlds, "
        f"{found.depth} steps deep, {time.process_time() - began:.1f} s"
    )
    if found.violation:
        lines = _folded(found.violation.trace)
        return _say("\n".join([f"{found.violation.rule}: {found.violation.what}", *lines]), 1)
    return _say("\n".join(f"holds in every state: {name}: {text}" for name, text in RULES.items()))


def _folded(trace: tuple[str, ...]) -> list[str]:
    """A driver that catches up with the log takes many steps; the last says what it found."""
    runs = groupby(trace, key=lambda line: line.split()[1] if "  log." in line else line)
    lines = [list(run)[-1] for _, run in runs]
    return [f"{number:3d}. {line}" for number, line in enumerate(lines, 1)]


def _say(text: str, code: int = 0) -> int:
    sys.stdout.write(text.rstrip("\n") + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
