"""The only action of the page: create a savepoint.

1. refuse   a request without the token or from another site, with a line in a file of its own
2. note     who, what and when, in the audit log; if that fails, nothing is done
3. do       as `onceflow savepoint create`, in a process of its own
4. note     the outcome
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request

from onceflow.errors import OnceflowError
from onceflow.page.access import Access, Audit
from onceflow.page.errors import AuditFailed, BadRequest, Busy, CommandFailed, checked
from onceflow.page.guard import requester
from onceflow.page.home_reader import HomeReader
from onceflow.protocol.home import now

Arguments = dict[str, Any]

_log = logging.getLogger(__name__)

# -P: without it, Python imports a file of the working directory in place of a module of that name.
_ONCEFLOW = [sys.executable, "-P", "-c", "from onceflow.cli import main; main()"]
_REMEMBERED = 3  # requests of each job
_LONGEST = 100  # characters of a text that somebody chose, in a line of the log
_PATIENCE = 5.0  # seconds that a savepoint gets to finish when the page stops


@dataclass
class SavepointRequest:
    """A savepoint that somebody asked for."""

    job: str
    name: str | None
    at: str
    state: str = "creating"  # then done, or failed
    made: dict[str, Any] = field(default_factory=dict)
    error: CommandFailed | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def announcement(self) -> str:
        """For screen readers: it changes with the state, not every second."""
        name = f"savepoint {self.name}" if self.name else "a savepoint"
        return {
            "creating": f"creating {name}",
            "done": f"{name} is created",
            "failed": f"no savepoint: {self.says}",
        }[self.state]

    @property
    def says(self) -> str:
        return self.error.message if self.error else ""

    @property
    def hint(self) -> str:
        return self.error.hint if self.error else ""


class Actions:
    """The actions of one page, on its event loop."""

    def __init__(self, home: Path, reader: HomeReader, access: Access, audit: Audit) -> None:
        self.access = access
        self._home, self._reader, self._audit = home, reader, audit
        self._requests: dict[str, deque[SavepointRequest]] = {}
        self._begun: set[str] = set()  # jobs of which a savepoint is being created
        self._running: dict[str, asyncio.Task[SavepointRequest]] = {}

    async def note(
        self, request: Request, action: str, job: str | None, arguments: Any, outcome: str
    ) -> None:
        """Write a line of the audit log. `AuditFailed`: the action must not be done."""
        who = requester(request)
        note = partial(self._audit.note, who, action, job, _cut(arguments), outcome)
        try:
            await self._reader.in_thread(note)
        except OSError as error:
            raise AuditFailed(
                f"not done, because the audit log cannot be written: {error.strerror}",
                hint=f"let the page write {self._audit.path}, then try again",
            ) from error

    async def refused(
        self, request: Request, action: str, job: str | None, arguments: Any, says: str
    ) -> None:
        """Write a line about a refused request. It stays refused even if that fails."""
        who, outcome = requester(request), f"refused: {says}"
        note = partial(self._audit.note, who, action, job, _cut(arguments), outcome, refused=True)
        try:
            await self._reader.in_thread(note)
        except OSError as error:
            _log.warning("a refusal could not be noted: %s", error)

    @contextlib.asynccontextmanager
    async def noting(self, request: Request, action: str) -> AsyncIterator[Arguments]:
        """Notes a request that the block refuses, with the arguments that it has read by then."""
        arguments: Arguments = {}
        try:
            yield arguments
        except OnceflowError as error:
            job = request.path_params.get("job", "")[:_LONGEST] or None
            await self.refused(request, action, job, arguments or None, error.message)
            raise

    def requests(self, job: str) -> list[SavepointRequest]:
        """The newest first."""
        return list(reversed(self._requests.get(job, ())))

    async def take(
        self, job: str, name: str | None, request: Request
    ) -> asyncio.Task[SavepointRequest]:
        """Begin a savepoint. The task ends when it is created or has failed."""
        async with self.noting(request, "savepoint") as arguments:
            arguments["name"] = name
            if name is not None:
                checked("savepoint", name)
            await self._reader.job(job)
            if job in self._begun:
                raise Busy(
                    f"another savepoint of {job} is being created", hint="wait until it exists"
                )
            self._begun.add(job)
        try:
            await self.note(request, "savepoint", job, arguments, "began")
        except BaseException:
            self._begun.discard(job)
            raise
        asked = SavepointRequest(job, name, now())
        task = asyncio.create_task(self._take(asked, request, arguments))
        self._running[job] = task
        task.add_done_callback(lambda _: self._ended(job))
        return task

    def _ended(self, job: str) -> None:
        self._begun.discard(job)
        self._running.pop(job, None)

    async def _take(
        self, asked: SavepointRequest, request: Request, arguments: Arguments
    ) -> SavepointRequest:
        self._requests.setdefault(asked.job, deque(maxlen=_REMEMBERED)).append(asked)
        outcome = "failed: the page was stopped"
        try:
            outcome = await asyncio.to_thread(self._create, asked)
        finally:
            with contextlib.suppress(AuditFailed):  # too late to refuse: only the line is lost
                await self.note(request, "savepoint", asked.job, arguments, outcome)
            self._reader.forget()
            asked.state = "done" if asked.made else "failed"  # last: viewers see the rest then
        return asked

    def _create(self, request: SavepointRequest) -> str:
        """In a process of its own, because it may read gigabytes while the job runs."""
        command = [*_ONCEFLOW, "savepoint", "create", request.job, f"--home={self._home}", "--json"]
        command += [f"--name={request.name}"] if request.name else []
        request.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C ends the page, which lets the savepoint finish
        )
        with request.process:
            out, err = request.process.communicate()
        try:
            if request.process.returncode == 0:
                request.made = json.loads(out)
                request.name = str(request.made["name"])
                return f"done: savepoint {request.name}"
            said = json.loads(err.splitlines()[-1])
            request.error = CommandFailed(said["message"], hint=said["hint"], kind=said["kind"])
        except (ValueError, KeyError, IndexError, TypeError):
            code = request.process.returncode
            request.error = CommandFailed(
                f"onceflow savepoint create ended with {code} and wrote no error", kind="Ended"
            )
        return f"failed: {request.says}"

    async def close(self) -> None:
        """The page stops: a savepoint that is nearly made may finish. The next one deletes the
        files of one that is ended."""
        if not self._running:
            return
        tasks = set(self._running.values())
        _, late = await asyncio.wait(tasks, timeout=_PATIENCE)
        for request in (one for made in self._requests.values() for one in made):
            if request.process is not None and request.process.poll() is None:
                request.process.terminate()
        if late:
            await asyncio.wait(late)


def savepoint_name(given: Any) -> str | None:
    """The name in a form or a body; None if it has none."""
    if given is None or given == "":
        return None
    if not isinstance(given, str):
        raise BadRequest(
            "the name of a savepoint is a text",
            hint="leave it out to name the savepoint after the time",
        )
    return given.strip() or None


def _cut(arguments: Any) -> Any:
    """A request chooses its texts, but not the length of a line."""
    if not isinstance(arguments, dict):
        return arguments
    return {
        name: value[:_LONGEST] if isinstance(value, str) else value
        for name, value in arguments.items()
    }
