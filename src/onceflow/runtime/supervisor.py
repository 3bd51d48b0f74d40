"""Keeps a driver running: a parent process that starts it again when that can help.

The supervisor is a process of its own because the driver's Python and its JVM can each hang or
die alone; ending the driver process ends both. A fault that a retry can't mend ends the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from onceflow.runtime.driver import RETRY

Event = dict[str, Any]

_GIVE_UP_AFTER = 5  # starts in a row without one published epoch
_LONGEST_PAUSE = 60.0
_KILLED = 128


@dataclass
class Supervisor:
    """Runs a driver until it ends by itself, is stopped, or cannot be helped."""

    arguments: list[str]
    tell: Callable[[Event], None]
    pause: Callable[[float], None] = time.sleep
    _driver: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _stopping: bool = field(default=False, init=False)

    def run(self) -> int:
        """The exit code of the run."""
        handlers = {s: signal.signal(s, self._stop) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._run()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self) -> int:
        failures = 0
        while True:
            progressed = False
            error: Event | None = None
            for event in self._one_life():
                progressed = progressed or _published(event)
                if event["event"] == "started":  # taken over once; from now on we defend it
                    self.arguments = [a for a in self.arguments if a != "--take-over"]
                if event["event"] == "error":
                    error = event
                else:
                    self.tell(event)
            assert self._driver is not None
            code = self._driver.wait()
            code = _KILLED - code if code < 0 else code
            if code == 0 or self._stopping:
                self._report(error)
                return 0 if code in (0, _KILLED + signal.SIGTERM) else code
            failures = 1 if progressed else failures + 1
            mendable = error["retryable"] if error else code > _KILLED or code == RETRY
            if not mendable or failures >= _GIVE_UP_AFTER:
                self._report(error or _crash(code))
                return code
            seconds = min(_LONGEST_PAUSE, 2.0 ** (failures - 1))
            self.tell({**(error or _crash(code)), "event": "restarting", "in_s": seconds})
            self.pause(seconds)
            if self._asked_to_stop():
                return 0

    def _asked_to_stop(self) -> bool:
        return self._stopping  # a signal may have come in between

    def _report(self, error: Event | None) -> None:
        if error is not None:
            self.tell(error)

    def _one_life(self) -> Iterator[Event]:
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "onceflow.runtime.driver", *self.arguments]
        self._driver = subprocess.Popen(
            [*command, "--events", str(writing)],
            stdin=subprocess.PIPE,  # its end tells the driver that we are gone
            pass_fds=[writing],
            start_new_session=True,  # Ctrl-C is for us: the driver stops at an epoch's end
        )
        os.close(writing)
        with os.fdopen(reading) as events:
            for line in events:
                yield json.loads(line)
        if self._driver.stdin is not None:
            self._driver.stdin.close()

    def _stop(self, *_: object) -> None:
        driver = self._driver
        again, self._stopping = self._stopping, True
        if driver is not None and driver.poll() is None:
            driver.send_signal(signal.SIGKILL if again else signal.SIGTERM)


def _published(event: Event) -> bool:
    return event["event"] == "progress" and any(
        query["published_s_ago"] is not None for query in event["queries"]
    )


def _crash(code: int) -> Event:
    name = signal.Signals(code - _KILLED).name if code > _KILLED else f"exit code {code}"
    return {"event": "error", "kind": "DriverDied", "message": f"the driver died ({name})",
            "hint": "", "exit_code": code, "retryable": True}  # fmt: skip
