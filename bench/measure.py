"""Measure two sides of a comparison in one run, taking turns, and say what came out.

Machines are noisy: the same work can take twice as long a minute later. So both sides are
measured in one run, alternating, and CPU seconds (of this process and everything it started) stand
beside wall time.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(root: int | None = None) -> float:
    """Of this process, or another, and all that it started, also of those that ended."""
    parents, times = _processes()
    total, left = 0, [root or os.getpid()]
    while left:
        pid = left.pop()
        total += times.get(pid, 0)
        left += parents.get(pid, [])
    return total / _TICKS


def _processes() -> tuple[dict[int, list[int]], dict[int, int]]:
    """Which processes each has started, and the ticks that each took with those that ended."""
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
    return parents, times


@contextlib.contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """The most MB of memory that were resident, looked at all the time: of this process, and of
    the largest of Spark's Python workers. Filled at the end."""
    found = {"driver": 0.0, "worker": 0.0}
    done = threading.Event()

    def look() -> None:
        while True:
            workers = [resident(pid) for pid in _workers()]
            found["driver"] = max(found["driver"], resident(os.getpid()))
            found["worker"] = max(found["worker"], *workers, 0.0)
            if done.wait(0.01):
                return

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield found
    finally:
        done.set()
        looking.join()


def resident(pid: int) -> float:
    """MB; 0 for a process that has ended."""
    with contextlib.suppress(OSError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def _workers() -> list[int]:
    found, left, parents = [], [os.getpid()], _processes()[0]
    while left:
        pid = left.pop()
        left += parents.get(pid, [])
        with contextlib.suppress(OSError):
            if b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


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


def alternate(
    sides: Mapping[str, Callable[[], object]],
    turns: int,
    after: Callable[[], object] = lambda: None,
) -> dict[str, Side]:
    """Each side once to warm up, then `turns` times each, taking turns.

    `after`: what follows each side's turn and is not measured, such as counting what it wrote.
    """
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
            after()
    return found


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Of the medians: above 1, ours took longer."""
    return statistics.median(ours) / statistics.median(theirs)


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(f"# {text}", file=sys.stderr, flush=True)
