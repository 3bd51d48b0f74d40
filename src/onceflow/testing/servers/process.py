"""One process of a server: start, kill, freeze and thaw it, and show the end of its log."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from onceflow.errors import SetupError

HOST = "127.0.0.1"
_PORTS = range(20_000, 32_000)  # below the ports that the kernel gives to outgoing connections
_GONE_WITHIN = 20.0  # seconds, after SIGKILL
_TAIL = 15  # lines
_ENDED = {"", "Z", "X"}  # states of a process
_STANDING = {*_ENDED, "T", "t"}
# If we are killed, the guard's standard input ends: it then kills the server and removes its files.
_GUARD = """
cat >/dev/null
kill -STOP "$1"
kill -9 "$1" $(cat "/proc/$1/task/$1/children")
sh -c "$3" tidy "$2"
rm -rf "$2" || { sleep 1; rm -rf "$2"; }
"""


class Process:
    """Runs `command`, with its output in `log`. All its files are in `folder`; the shell script
    `tidy`, which gets the folder as an argument, removes everything else."""

    def __init__(
        self, name: str, command: list[str], *, log: Path, folder: Path, tidy: str = ":"
    ) -> None:
        self.name, self.log = name, log
        self._command, self._folder, self._tidy = command, folder, tidy
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process else None

    def launch(self) -> None:
        """Start it, unless it runs."""
        if self.pid is not None:
            return
        self.ended()
        with self.log.open("ab") as said:
            self._process = subprocess.Popen(
                self._command, cwd=self.log.parent, stdin=subprocess.DEVNULL, stdout=said,
                stderr=said, start_new_session=True,
            )  # fmt: skip
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", str(self._process.pid), str(self._folder), self._tidy],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip

    def wait_until(self, ready: Callable[[], bool], *, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if self.pid is None:
                raise self._failed("ended")
            if time.monotonic() > deadline:
                raise self._failed(f"does not answer after {seconds:.0f} s")
            time.sleep(0.02)

    def _failed(self, how: str) -> SetupError:
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL:]
        said = "\n  ".join(lines) or "(empty)"
        return SetupError(
            f"{self.name} {how}. The end of its log:\n  {said}",
            hint="fix the cause that the log names; onceflow doctor checks Java and the disk",
        )

    def freeze(self) -> None:
        """Stop it and its children."""
        self._stand_still()

    def thaw(self) -> None:
        for pid in self._family():
            _signal(pid, signal.SIGCONT)

    def kill(self) -> None:
        """`kill -9` of it and its children: a crash. Returns when all are gone."""
        family = self._stand_still()
        for pid in family:
            _signal(pid, signal.SIGKILL)
        self.ended()
        deadline = time.monotonic() + _GONE_WITHIN
        while any(_state(pid) not in _ENDED for pid in family):
            if time.monotonic() > deadline:
                raise self._failed("cannot be killed")
            time.sleep(0.01)

    def _stand_still(self) -> list[int]:
        """Stop the parent first: after that it creates no children, so all of them are known."""
        pid = self.pid
        if pid is None:
            return []
        _signal(pid, signal.SIGSTOP)
        while _state(pid) not in _STANDING:
            time.sleep(0.001)
        family = self._family()
        for child in family[1:]:
            _signal(child, signal.SIGSTOP)
        return family

    def _family(self) -> list[int]:
        pid = self.pid
        return [] if pid is None else [pid, *_children(pid)]

    def remove(self) -> None:
        """Kill it, if it runs, and remove all its files."""
        self.kill()
        subprocess.run(
            ["sh", "-c", self._tidy, "tidy", str(self._folder)], check=False, capture_output=True
        )
        shutil.rmtree(self._folder, ignore_errors=True)

    def ended(self, *, within: float = _GONE_WITHIN) -> None:
        """Wait until it has ended; reap it and its guard."""
        if self._process is not None:
            self._process.wait(within)
        if self._guard is not None:
            self._guard.kill()
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _children(parent: int) -> list[int]:
    """The children that have not ended; none if there is no /proc."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if _stat(pid)[1] == str(parent) and _state(pid) not in _ENDED]


def _state(pid: int) -> str:
    """The state in the kernel. T: stopped; Z: ended but not reaped; empty: gone, or no /proc."""
    return _stat(pid)[0]


def _stat(pid: int) -> list[str]:
    """State and parent, empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["", ""]


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody uses. A server that is started again finds its port free, since
    the kernel gives these ports to no outgoing connection."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise SetupError(
        "no loopback port is free", hint="end some programs that listen on this machine"
    )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def make_folder(folder: Path) -> Path:
    """A new folder for a server, which is removed with the server."""
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise SetupError(
            f"{folder} is there already",
            hint="name a new folder: it will be removed with the server",
        ) from None
    return folder


def refuse(what: str, variable: str) -> SetupError:
    return SetupError(
        f"{what} a server that is not ours: {variable} names it",
        hint=f"unset {variable}: then a server is started for the test",
    )
