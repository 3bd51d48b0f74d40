"""Several drivers on one store, one operation at a time, in an order that a seed decides.

Each driver is a thread that does its next operation when it is its turn. So every race between
two operations can be had, and had again with the same seed. `Truth` watches every operation: it
is the plain list that the numbered log must come to.
"""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from onceflow.store.posix import Store


def seeds(count: int) -> Iterator[int]:
    """Each is printed before it is played. `scripts/test --all` plays ten times as many."""
    for seed in range(count * (10 if os.environ.get("ONCEFLOW_TEST_ALL") else 1)):
        print("seed", seed)
        yield seed


class Killed(BaseException):
    """The driver is gone between two operations."""


class Turns:
    """`kill`: how likely a driver dies at a step."""

    def __init__(self, seed: int, *, kill: float = 0.0) -> None:
        self.random = random.Random(seed)
        self._kill = kill
        self._change = self.random.choice((0.05, 0.2, 1.0))  # long pauses, or all at once
        self._back = threading.Semaphore(0)
        self._mine = threading.local()

    def run(self, *actors: Callable[[], None]) -> None:
        """Until all have ended. What one of them raises is raised here."""
        gates = [threading.Semaphore(0) for _ in actors]
        failures: list[BaseException] = []
        waiting = list(range(len(actors)))

        def live(number: int) -> None:
            self._mine.gate = gates[number]
            self._mine.gate.acquire()
            try:
                actors[number]()
            except BaseException as error:
                failures.append(error)
            waiting.remove(number)
            self._back.release()

        threads = [threading.Thread(target=live, args=(n,), daemon=True) for n in waiting]
        for thread in threads:
            thread.start()
        turn = 0
        while waiting and not failures:
            if turn not in waiting or self.random.random() < self._change:
                turn = self.random.choice(waiting)
            gates[turn].release()
            self._back.acquire()
        if failures:
            raise failures[0]
        for thread in threads:
            thread.join()

    def wait(self) -> None:
        """Until it is our turn."""
        self._back.release()
        self._mine.gate.acquire()

    def step(self) -> None:
        """As a driver waits: now and then its turn never comes."""
        self.wait()
        if self.random.random() < self._kill:
            raise Killed


class Truth:
    """The entries that counted when they were put: above the newest roll-up of that moment."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self._covered = 0

    def won(self, name: str, data: bytes) -> None:
        stem = name.rpartition("/")[2].removesuffix(".json")
        if stem.startswith("rollup-"):
            self._covered = max(self._covered, int(stem.removeprefix("rollup-")))
        elif stem.isdecimal() and int(stem) > self._covered:
            assert int(stem) == len(self.entries) + 1, f"{name} leaves a hole or is there twice"
            self.entries.append(json.loads(data.split(b"\n")[1]))


class Stepped:
    """A store whose every operation is one turn. Now and then the answer to a put is lost."""

    def __init__(self, store: Store, turns: Turns, truth: Truth, *, lose: float = 0.0) -> None:
        self._store, self._turns, self._truth, self._lose = store, turns, truth, lose

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self._turns.step()
        won = self._store.put_if_absent(name, data)
        if won:
            self._truth.won(name, data)
        return won and self._turns.random.random() >= self._lose

    def read(self, name: str) -> bytes | None:
        self._turns.step()
        return self._store.read(name)

    def list(self, folder: str = "") -> list[str]:
        self._turns.step()
        return self._store.list(folder)

    def delete(self, name: str) -> None:
        self._turns.step()
        self._store.delete(name)

    def where(self, name: str) -> str:
        return self._store.where(name)
