"""Who may act through the page, and the record of who tried.

Reading needs nothing but a way to the port. An action needs the token: given by a program in the
header `X-Onceflow-Token`, or typed once into the page's form, which opens a session: a random
cookie that scripts cannot read and that other sites' requests do not carry, with a second secret
that each form must repeat. Sessions are in memory: a restart of the page ends them.

The token is never in a URL, in a log or on a command line. It is compared in constant time; wrong
ones are answered slowly, and after some of them from one address nobody there is heard for a while.
"""

from __future__ import annotations

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
from onceflow.protocol.home import now

AUDIT, REFUSED = "_audit.jsonl", "_refused.jsonl"
_SHORTEST = 16  # characters of a token that a person chose
_LIFE = 12 * 3600.0  # seconds of a session
_MOST_SESSIONS = 100
_TRIES = 5  # wrong tokens from one address in _WHILE seconds; then it is not heard
_WHILE = 60.0
_WHERE = "it is the text after `token:` where the page was started, or that of its --token-file"
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
            f"no token can be read from {path}: {error}", hint="name a file with one line in it"
        ) from error
    if len(token) < _SHORTEST or not token.isascii() or not token.isprintable():
        raise JobError(
            f"the token in {path} is shorter than {_SHORTEST} characters, or has others than ASCII",
            hint="make one: python -c 'import secrets; print(secrets.token_urlsafe(24))'",
        )
    open_to_others = mode & (stat.S_IRGRP | stat.S_IROTH)
    return token, f"{path} can be read by other users: chmod 600 it" if open_to_others else None


@dataclass(frozen=True)
class Session:
    """Somebody typed the token."""

    csrf: str  # each form of the session repeats it
    until: float


@dataclass(frozen=True)
class Refusal:
    """Why an action is not done: a status, and words for a person."""

    status: int
    says: str
    hint: str = ""
    retry_after: int | None = None


@dataclass
class Access:
    """The token and the sessions of one page. `token` None: nobody can act through it."""

    token: str | None
    slow_s: float = 1.0  # before a wrong token is answered
    clock: Callable[[], float] = time.monotonic
    _sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict)
    _wrong: OrderedDict[str, deque[float]] = field(default_factory=OrderedDict)

    @property
    def read_only(self) -> bool:
        return self.token is None

    def refuse_token(self, given: str, address: str) -> Refusal | None:
        """None: it is the token."""
        if self.token is None:
            return Refusal(
                403, "this page is read-only", "start it without --read-only to act through it"
            )
        tries = self._tries(address)
        if len(tries) >= _TRIES:
            seconds = max(1, round(_WHILE - (self.clock() - tries[0])))
            return Refusal(
                429, f"too many wrong tokens: try again in {seconds} s", retry_after=seconds
            )
        if hmac.compare_digest(given.encode(), self.token.encode()):
            self._wrong.pop(address, None)
            return None
        if not given:
            return Refusal(401, "this needs the token", _WHERE)
        tries.append(self.clock())
        return Refusal(401, "that is not the token", _WHERE)

    def _tries(self, address: str) -> deque[float]:
        """The wrong tokens that came from an address lately."""
        tries = self._wrong.setdefault(address, deque(maxlen=_TRIES))
        self._wrong.move_to_end(address)
        while tries and self.clock() - tries[0] > _WHILE:
            tries.popleft()
        while len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)
        return tries

    # -------------------------------------------------------------- sessions

    def open(self) -> str:
        """For whoever gave the token: the value of the cookie."""
        key = secrets.token_urlsafe(32)
        self._sessions[key] = Session(secrets.token_urlsafe(24), self.clock() + _LIFE)
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

    def refuse_form(self, session: Session | None, csrf: str) -> Refusal | None:
        """None: the form is one that we gave to this session."""
        if self.token is None:
            return self.refuse_token("", "")
        if session is None:
            return Refusal(401, "this needs the token", "unlock actions first: see the top right")
        if not hmac.compare_digest(csrf.encode(), session.csrf.encode()):
            return Refusal(
                403, "this form is not of your session", "load the page anew, and try again"
            )
        return None


class Audit:
    """Who did what through the page: a line each in `<home>/_audit.jsonl`, made durable before the
    answer is given. What cannot be written down is not done.

    Who was refused is in `<home>/_refused.jsonl`: anybody can be refused, as often as they like,
    and must not push out what was done.
    """

    def __init__(self, home: Path) -> None:
        self.path, self.refused = home / AUDIT, home / REFUSED
        self._lock = threading.Lock()

    def note(
        self, who: dict[str, Any], action: str, job: str | None, arguments: Any, outcome: str,
        *, refused: bool = False,
    ) -> None:  # fmt: skip
        """`who`: the address, and what a proxy claims about it."""
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
