"""A running job with input, and `onceflow serve`, as processes for the browser to look at."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pyarrow as pa

from onceflow.log import EmbeddedLog

ONCEFLOW = [sys.executable, "-c", "from onceflow.cli import main; main()"]
SECONDS = 120  # until a condition must hold; a start of Spark takes long on a busy machine
WORDS = "an ad is a word and so are orders clicks campaigns impressions restaurants couriers"
TOKEN = "correct-horse-battery-staple"

Event = dict[str, Any]
T = TypeVar("T")


def patiently(condition: Callable[[], T]) -> T:
    """Wait until the condition holds; return its value."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)
    return found


def onceflow(*arguments: object) -> Any:
    """The output of a command with --json."""
    command = [*ONCEFLOW, *map(str, arguments), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    return json.loads(done.stdout)


class Process:
    """A running command of onceflow, and the events that it prints. The block ends it."""

    def __init__(self, *arguments: object, cwd: Path, **environment: str) -> None:
        self.events: list[Event] = []
        self.process = subprocess.Popen(
            [*ONCEFLOW, *map(str, arguments), "--json"],
            cwd=cwd,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def hear(self, kind: str, times: int = 1) -> Event:
        """Wait for an event, or for the nth of its kind."""

        def heard() -> list[Event]:
            found = [event for event in list(self.events) if event["event"] == kind]
            assert len(found) >= times or self.process.poll() is None, self.events[-3:]
            return found[times - 1 :]

        return patiently(heard)[0]

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        code = self.process.wait(SECONDS)
        self._reader.join(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.end()


def serve(home: Path, port: int = 0) -> Process:
    """The page of a home; its token is TOKEN, its address `hear("serving")["url"]`."""
    secret = home.parent / "token"
    if not secret.exists():
        secret.touch(0o600)
        secret.write_text(TOKEN)
    home.mkdir(exist_ok=True)
    return Process("serve", "--home", home, "--port", port, "--token-file", secret, cwd=home.parent)


class Words:
    """The job `words` under its supervisor, with endless input."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self._log = EmbeddedLog.create(folder / "data" / "lines")
        self._stopped = threading.Event()
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()
        job = Path(__file__).with_name("counting.py")
        self.run = Process(
            "run", job, "--home", self.home, "--master", "local[1]",
            cwd=folder,
            JDK_JAVA_OPTIONS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        )  # fmt: skip

    def _feed(self) -> None:
        chance, words = random.Random(9), WORDS.split()
        while not self._stopped.wait(0.25):
            lines = [" ".join(chance.choices(words, k=8)) for _ in range(20)]
            now = pa.array([datetime.now(UTC)] * len(lines), pa.timestamp("us", "UTC"))
            self._log.append(pa.table({"value": lines, "event_time": now}))

    def driver(self) -> int:
        """The process id in the newest `started` event."""
        started = [event for event in list(self.run.events) if event["event"] == "started"]
        return int(started[-1]["pid"])

    def close(self) -> None:
        self._stopped.set()
        self._feeder.join(SECONDS)
        if self.run.process.poll() is None:
            self.run.end()
