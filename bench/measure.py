"""Measure two sides of a comparison in one run, taking turns, and say what came out.

Machines are noisy: the same work can take twice as long a minute later. So both sides are
measured in one run, alternating, and CPU seconds (of this process and everything it started) stand
beside wall time.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Of this process and all that it started, also of those that ended."""
    parents: dict[int, list[int]] = {}
    times: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
            times[int(entry.name)] = sum(map(int, fields[11:15]))
    total, left = 0, [os.getpid()]
    while left:
        pid = left.pop()
        total += times.get(pid, 0)
        left += parents.get(pid, [])
    return total / _TICKS


@dataclass
class Side:
    """What one side of a comparison took, turn by turn."""

    name: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    said: list[float] = field(default_factory=list)  # what the work itself measured, if it did

    def __str__(self) -> str:
        return f"{self.name}: wall {spread(self.wall)}, cpu {spread(self.cpu)}"


def spread(values: list[float], unit: str = "s") -> str:
    """Median, and between what the middle half lies."""
    middle = statistics.median(values)
    if len(values) < 4:
        return f"{middle:.3f} {unit} ({min(values):.3f} to {max(values):.3f})"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} {unit} ({low:.3f} to {high:.3f})"


def alternate(sides: Mapping[str, Callable[[], object]], turns: int) -> dict[str, Side]:
    """Each side once to warm up, then `turns` times each, taking turns."""
    found = {name: Side(name) for name in sides}
    for turn in range(turns + 1):
        for name, work in sides.items():
            cpu, wall = cpu_seconds(), time.perf_counter()
            said = work()
            wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
            if turn:
                found[name].wall.append(wall)
                found[name].cpu.append(cpu)
                if isinstance(said, float):
                    found[name].said.append(said)
            progress(f"turn {turn} of {turns}, {name}: {wall:.2f} s, cpu {cpu:.2f} s")
    return found


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Of the medians: above 1, ours took longer."""
    return statistics.median(ours) / statistics.median(theirs)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(f"# {text}", file=sys.stderr, flush=True)
