"""Who may act through the page, and the audit log.

Everybody who reaches the port may read. An action needs the token. A program sends it in the header
`X-Onceflow-Token`. A person types it once into a form of the page, which opens a session: a random
cookie that scripts cannot read and that requests of other sites do not carry, and a second secret
that each form repeats. Sessions are in memory: a restart of the page ends them.

The token is never in a URL, in a log or on a command line. It is compared in constant time. A wrong
token is answered slowly, and after some wrong tokens the page refuses every token from that address
for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import stat
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onceflow.errors import JobError
from onceflow.page.errors import Refused
from onceflow.protocol.home import now

AUDIT, REFUSED = "_audit.jsonl", "_refused.jsonl"
_SHORTEST = 16  # characters of a token that a person chose
LIFE = 12 * 3600  # seconds of a session
_MOST_SESSIONS = 100
_TRIES = 5  # wrong tokens in _WHILE seconds; then every token of the address is refused
_WHILE = 60.0
_WHERE = "the page printed it after `token:` when it started, or it is in its --token-file"
_MOST_ADDRESSES = 1000
_LARGEST_AUDIT = 10_000_000  # bytes of each file; then it becomes _audit.jsonl.1


def new_token() -> str:
    return secrets.token_urlsafe(24)


def token_in(path: str) -> tuple[str, str | None]:
    """The token of a file, and a warning if others can read it."""
    try:
        token = Path(path).read_text().strip()
        mode = os.stat(path).st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(
            f"no token can be read from {path}: {error}", hint="name a file with one line of text"
        ) from error
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable():
        raise JobError(
            f"the token in {path} is shorter than {_SHORTEST} characters, or is not plain ASCII",
            hint="make one: python -c 'import secrets; print(secrets.token_urlsafe(24))'",
        )
    open_to_others = mode & (stat.S_IRGRP | stat.S_IROTH)
    return token, f"{path} can be read by other users: chmod 600 it" if open_to_others else None


@dataclass(frozen=True)
class Session:
    """It is opened for somebody who typed the token."""

    csrf: str  # each form of the session repeats it
    until: float


@dataclass
class Access:
    """The token and the sessions of one page. If `token` is None, nobody can act through it."""

    token: str | None
    slow_s: float = 1.0  # before a wrong token is answered
    clock: Callable[[], float] = time.monotonic
    _sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    _wrong: OrderedDict[str, deque[float]] = field(default_factory=OrderedDict)

    @property
    def read_only(self) -> bool:
        return self.token is None

    async def check_token(self, given: str, address: str) -> None:
        """`Refused` unless it is the token. A wrong one waits for its answer."""
        refusal = self.refuse_token(given, address)
        if refusal is None:
            return
        if given:
            await asyncio.sleep(self.slow_s)
        raise refusal

    def refuse_token(self, given: str, address: str) -> Refused | None:
        """None if it is the token."""
        if self.token is None:
            return _read_only()
        tries = self._tries(address)
        if len(tries) >= _TRIES:
            seconds = max(1, round(_WHILE - (self.clock() - tries[0])))
            return Refused(
                f"too many wrong tokens: try again in {seconds} s", status=429, retry_after=seconds
            )
        if hmac.compare_digest(given.encode(), self.token.encode()):
            self._wrong.pop(address, None)
            return None
        if not given:
            return Refused("this needs the token", hint=_WHERE, status=401)
        tries.append(self.clock())
        return Refused("that is not the token", hint=_WHERE, status=401)

    def _tries(self, address: str) -> deque[float]:
        """When wrong tokens came from an address lately."""
        tries = self._wrong.setdefault(address, deque(maxlen=_TRIES))
        self._wrong.move_to_end(address)
        while tries and self.clock() - tries[0] > _WHILE:
            tries.popleft()
        while len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)
        return tries

    # -------------------------------------------------------------- sessions

    def open(self) -> str:
        """A new session, for somebody who gave the token: the value of its cookie."""
        key = secrets.token_urlsafe(32)
        self._sessions[key] = Session(secrets.token_urlsafe(24), self.clock() + LIFE)
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return key

    def session(self, cookie: str | None) -> Session | None:
        found = self._sessions.get(cookie or "")
        if found is not None and found.until < self.clock():
            self._sessions.pop(cookie or "", None)
            return None
        return found

    def close(self, cookie: str | None) -> None:
        self._sessions.pop(cookie or "", None)

    def check_form(self, cookie: str | None, csrf: str) -> None:
        """`Refused` unless the page gave the form to the session of this cookie."""
        session = self.session(cookie)
        if self.token is None:
            raise _read_only()
        if session is None:
            raise Refused(
                "this needs the token", hint="unlock actions first, at the top right", status=401
            )
        if not hmac.compare_digest(csrf.encode(), session.csrf.encode()):
            raise Refused("this form is not of your session", hint="reload the page, try again")


def _read_only() -> Refused:
    return Refused("this page is read-only", hint="start it without --read-only to act")


class Audit:
    """A line for each action in `<home>/_audit.jsonl`, durable before the answer is sent. If it
    cannot be written, nothing is done.

    Refused requests are in `<home>/_refused.jsonl`: anybody can be refused any number of times, and
    must not push actions out of the log.
    """

    def __init__(self, home: Path) -> None:
        self.path, self.refused = home / AUDIT, home / REFUSED
        self._lock = threading.Lock()

    def note(
        self, who: dict[str, Any], action: str, job: str | None, arguments: Any, outcome: str,
        *, refused: bool = False,
    ) -> None:  # fmt: skip
        """`who`: the address, and the address that a proxy claims."""
        line = {"at": now(), **who, "action": action, "job": job, "arguments": arguments,
                "outcome": outcome}  # fmt: skip
        data = json.dumps(line).encode() + b"\n"
        path = self.refused if refused else self.path
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > _LARGEST_AUDIT:
                    os.replace(path, path.with_name(f"{path.name}.1"))
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, data)
                os.fsync(handle)
            finally:
                os.close(handle)
