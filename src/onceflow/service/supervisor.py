"""Keep a driver running: the parent process starts it again when a retry can help.

The supervisor is a process of its own because the driver's Python and its JVM can each hang or die
alone; ending the driver's process group ends both. An error that a new start cannot fix ends the
run, and so does one that comes back at every start. The supervisor waits for a server that is away.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from onceflow.jobs.stop_request import WaitingRun
from onceflow.protocol.home import now
from onceflow.service.error_report import RETRY, describe_exit
from onceflow.service.journal import Journal

Event = dict[str, Any]

_GIVE_UP_AFTER = 5  # failed starts in a row; those during which a server is away do not count
_HEALTHY_AFTER = 60.0  # seconds of a started job without input
_LONGEST_PAUSE = 60.0
_TICK = 0.25
_GRACE = 10.0  # seconds for a JVM whose driver is gone: it removes its temporary files
_SHORT_GRACE = 0.5  # if it had not started yet
_KILLED = 128
_NOBODY_LISTENS = _KILLED + signal.SIGPIPE


class Screen(Protocol):
    """Where the supervisor shows what happens."""

    def show(self, event: Event) -> None: ...

    def tick(self) -> None:
        """Time has passed; called a few times a second."""

    def close(self) -> None:
        """No more events follow."""


class Supervisor:
    """Runs a driver until it ends by itself, is stopped, or fails for good."""

    def __init__(self, arguments: list[str], screen: Screen, *, first_pause: float = 1.0) -> None:
        self._arguments = arguments
        self._waits = (
            "--once" not in arguments
        )  # with --once, the caller decides whether to try again
        self._first_pause = first_pause  # seconds; each further one is twice as long
        self._screen: Screen | None = screen
        self._driver: _Driver | None = None
        self._job: Path | None = None  # its folder, when its driver has named it
        self._stopping = threading.Event()
        self._asked_to_stop = self._told_stopping = 0  # times

    def run(self) -> int:
        """The exit code of the run."""
        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            wanted.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, self._stop) for number in wanted}
        try:
            code = self._run()
            if self._screen is not None:
                self._screen.close()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return code if self._screen is not None else _NOBODY_LISTENS

    def _run(self) -> int:
        failures, starts, pause = 0, 0, 0.0
        while True:
            starts += 1
            self._tell({"event": "starting", "job": self._arguments[0], "start": starts})
            code, error, healthy = self._one_life()
            if code == 0 or self._stopping.is_set():
                if error is not None:
                    self._tell(error)
                else:
                    self._record({"event": "ended", "at_once": self._asked_to_stop > 1})
                return 0 if code in (0, _KILLED + signal.SIGTERM) else code
            error = error or _crash(code)
            away = self._waits and error.get("away", False)
            failures = (0 if healthy else failures) + (not away)
            if not error["retryable"] or failures >= _GIVE_UP_AFTER:
                self._tell(error)
                return code
            pause = self._first_pause if healthy or not pause else min(_LONGEST_PAUSE, 2.0 * pause)
            seconds = 0.0 if healthy else pause
            self._tell({**error, "event": "restarting", "in_s": seconds, "away": away})
            if self._asked_within(seconds):
                self._tell_stopping()
                self._record({"event": "ended", "at_once": False})
                return 0

    def _asked_within(self, seconds: float) -> bool:
        """Wait before the next start. True if a signal or `onceflow stop` asks the run to end."""
        if self._job is None or not seconds:
            return self._stopping.wait(seconds)
        waiting, deadline = WaitingRun(self._job), time.monotonic() + seconds
        while not waiting.heard() and time.monotonic() < deadline:
            if self._stopping.wait(min(_TICK, max(0.0, deadline - time.monotonic()))):
                break
        if waiting.close():
            self._stopping.set()
            self._asked_to_stop += 1
        return self._stopping.is_set()

    def _one_life(self) -> tuple[int, Event | None, bool]:
        """Follow a driver from start to end. Returns its exit code, its error, and whether it
        decided an epoch or ran for a while."""
        error: Event | None = None
        epochs, started = 0, float("inf")
        self._driver = _Driver(self._arguments)
        if self._stopping.is_set():  # a signal came while it was being started
            self._driver.stop(at_once=False)
        for event in self._driver.follow():
            self._tell_stopping()
            match event:
                case None:
                    self._tick()
                case {"event": "stopping"}:  # by `onceflow stop`: do not start it again
                    self._stopping.set()
                    self._tell(event)
                case {"event": "loaded"}:
                    self._job = _home(self._arguments) / event["job"]
                case {"event": "error"}:
                    error, epochs = event, max(epochs, event.pop("epochs", 0))
                case _:
                    epochs = max(epochs, sum(q["epochs"] for q in _queries(event)))
                    if event["event"] == "session":
                        self._job = _home(self._arguments) / event["job"]
                    if event["event"] == "started":
                        started = time.monotonic()
                        # Take over once; from now on this run keeps the lease.
                        self._arguments = [a for a in self._arguments if a != "--take-over"]
                    self._tell(event)
        healthy = epochs > 0 or time.monotonic() - started > _HEALTHY_AFTER
        return self._driver.code(), error, healthy

    def _stop(self, *_: object) -> None:
        self._asked_to_stop += 1
        self._stopping.set()
        if self._driver is not None:
            self._driver.stop(at_once=self._asked_to_stop > 1)

    # -------------------------------------------------------------- showing

    def _tell_stopping(self) -> None:
        if self._asked_to_stop > self._told_stopping:
            self._told_stopping = self._asked_to_stop
            self._tell({"event": "stopping", "at_once": self._asked_to_stop > 1})

    def _record(self, event: Event) -> None:
        if self._job is not None and event["event"] != "starting":  # the driver writes this event
            Journal(self._job).event(**event)

    def _tell(self, event: Event) -> None:
        self._record(event)
        if self._screen is not None:
            with self._or_stop():
                self._screen.show({"event": event["event"], "at": now(), **event})

    def _tick(self) -> None:
        if self._screen is not None:
            with self._or_stop():
                self._screen.tick()

    @contextlib.contextmanager
    def _or_stop(self) -> Iterator[None]:
        """If nobody reads any longer (a closed pipe or terminal), stop at the end of the epoch."""
        try:
            yield
        except OSError:
            self._screen = None
            if not self._stopping.is_set():
                self._stop()


class _Driver:
    """A driver process, its events, and the lines that the job prints."""

    def __init__(self, arguments: list[str]) -> None:
        reading, writing = os.pipe()
        # -P: the imports of the job file begin in its folder, not in the working directory.
        command = [sys.executable, "-P", "-u", "-m", "onceflow.service.driver", *arguments]
        self._process = subprocess.Popen(
            [*command, "--events", str(writing)],
            stdin=subprocess.PIPE,  # its end tells the driver that the supervisor has ended
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[writing],
            start_new_session=True,  # Ctrl-C is for the supervisor, which asks the driver to stop
        )
        os.close(writing)
        assert self._process.stdout is not None
        self._events, self._output = reading, self._process.stdout.fileno()
        self._partial = {self._events: b"", self._output: b""}
        self._grace = _SHORT_GRACE
        self._open = selectors.DefaultSelector()
        for fd in self._partial:
            os.set_blocking(fd, False)
            self._open.register(fd, selectors.EVENT_READ)

    def stop(self, *, at_once: bool) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if at_once:
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    os.kill(self._process.pid, signal.SIGTERM)

    def code(self) -> int:
        code = self._process.wait()
        return _KILLED - code if code < 0 else code

    def follow(self) -> Iterator[Event | None]:
        """Its events and lines until it and its JVM have ended, and None a few times a second."""
        while self._process.poll() is None:
            yield from self._listen()
        deadline = time.monotonic() + self._grace
        while self._open.get_map() and time.monotonic() < deadline:
            yield from self._listen()  # the pipes end with the last process that holds them
        if self._open.get_map():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._close()

    def _listen(self) -> Iterator[Event | None]:
        if not self._open.get_map():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_TICK)
        for key, _ in self._open.select(_TICK) if self._open.get_map() else ():
            yield from self._read(key.fd)
        yield None

    def _read(self, fd: int) -> Iterator[Event]:
        data = os.read(fd, 65536)
        *lines, self._partial[fd] = (self._partial[fd] + data).split(b"\n")
        if not data:
            self._open.unregister(fd)
            if fd == self._output and self._partial[fd]:
                lines.append(self._partial[fd])
        for line in lines:
            if fd == self._events:
                event: Event = json.loads(line)
                self._grace = _GRACE if event["event"] == "session" else self._grace
                yield event
            else:
                yield {"event": "output", "text": line.decode(errors="replace").rstrip("\r")}

    def _close(self) -> None:
        self._open.close()
        os.close(self._events)
        for pipe in (self._process.stdout, self._process.stdin):
            if pipe is not None:
                pipe.close()


def _home(arguments: list[str]) -> Path:
    found = next(a for a in arguments if a.startswith("--home="))
    return Path(os.path.abspath(found.removeprefix("--home=")))


def _queries(event: Event) -> list[Event]:
    return event["queries"] if event["event"] in ("progress", "ended") else []


def _crash(code: int) -> Event:
    """The error of a driver that ended without reporting one."""
    killed = code > _KILLED
    how = describe_exit(_KILLED - code if killed else code)
    hint = "something in the job ended the process: look for exit and os._exit"
    if killed:
        hint = "a person or the kernel ended it: dmesg says if the machine lacks memory"
    return {"event": "error", "kind": "DriverDied", "message": f"the driver {how}", "hint": hint,
            "exit_code": code, "retryable": killed or code == RETRY}  # fmt: skip
