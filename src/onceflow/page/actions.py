"""What can be done through the page: a savepoint. All else it only shows how to do.

1. refuse   who has no token, or another site's form, with a line in a file of its own
2. note     who, what and when, in the audit log; what cannot be noted is not done
3. do       in a process of its own, with a low priority, as `onceflow savepoint create` does it
4. note     what came of it
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from onceflow.errors import OnceflowError
from onceflow.page.access import Audit
from onceflow.page.api import BadRequest, checked
from onceflow.page.watch import Watch
from onceflow.protocol.home import now

Who = dict[str, str]

_log = logging.getLogger(__name__)

# -P: else a file of the working directory is imported in the place of a module of that name.
_ONCEFLOW = [sys.executable, "-P", "-c", "from onceflow.cli import main; main()"]
_REMEMBERED = 3  # of each job
_LONGEST = 100  # characters of a name that somebody made up, in a line of the log
_PATIENCE = 5.0  # seconds for one that is being taken when the page stops


class Busy(OnceflowError):
    """One is being taken already."""

    retryable = True


class NotNoted(OnceflowError):
    """The audit log takes no line, so nothing was done."""


class Failed(OnceflowError):
    """The command said no; `kind` is its own error."""

    def __init__(self, message: str, *, hint: str = "", kind: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


@dataclass
class Taking:
    """A savepoint that somebody asked for."""

    job: str
    name: str | None
    at: str
    state: str = "taking"  # then done, or failed
    made: dict[str, Any] = field(default_factory=dict)
    error: Failed | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def told(self) -> str:
        """For who listens: it changes when the state does, and not each second."""
        name = f"savepoint {self.name}" if self.name else "a savepoint"
        return {
            "taking": f"taking {name}",
            "done": f"{name} is taken",
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

    def __init__(self, home: Path, watch: Watch, audit: Audit) -> None:
        self._home, self._watch, self._audit = home, watch, audit
        self._taken: dict[str, deque[Taking]] = {}
        self._begun: set[str] = set()  # jobs of which one is being taken, or about to be
        self._running: dict[str, asyncio.Task[Taking]] = {}

    async def note(
        self, who: Who, action: str, job: str | None, arguments: Any, outcome: str
    ) -> None:
        """A line of the audit log, off the loop. `NotNoted`: then it must not be done."""
        note = partial(self._audit.note, who, action, job, _cut(arguments), outcome)
        try:
            await self._watch.in_thread(note)
        except OSError as error:
            raise NotNoted(
                f"not done, for it cannot be written down: {error.strerror}",
                hint=f"let the page write {self._audit.path}, then try again",
            ) from error

    async def refused(
        self, who: Who, action: str, job: str | None, arguments: Any, says: str
    ) -> None:
        """A line about what is not done. It stays refused if there is no place for the line."""
        told = f"refused: {says}"
        note = partial(self._audit.note, who, action, job, _cut(arguments), told, refused=True)
        try:
            await self._watch.in_thread(note)
        except OSError as error:
            _log.warning("a refusal could not be written down: %s", error)

    def taken(self, job: str) -> list[Taking]:
        """The newest first."""
        return list(reversed(self._taken.get(job, ())))

    async def take(self, job: str, name: str | None, who: Who) -> asyncio.Task[Taking]:
        """Begin a savepoint. The task ends with it, failed or not."""
        arguments = {"name": name}
        try:
            if name is not None:
                checked("savepoint", name)
            await self._watch.job(job)
            if job in self._begun:
                raise Busy(
                    f"a savepoint of {job} is being taken already", hint="wait until it is there"
                )
        except OnceflowError as error:
            await self.refused(who, "savepoint", job, arguments, error.message)
            raise
        self._begun.add(job)
        try:
            await self.note(who, "savepoint", job, arguments, "began")
        except BaseException:
            self._begun.discard(job)
            raise
        task = asyncio.create_task(self._take(Taking(job, name, now()), who, arguments))
        self._running[job] = task
        task.add_done_callback(lambda _: self._ended(job))
        return task

    def _ended(self, job: str) -> None:
        self._begun.discard(job)
        self._running.pop(job, None)

    async def _take(self, taking: Taking, who: Who, arguments: Any) -> Taking:
        self._taken.setdefault(taking.job, deque(maxlen=_REMEMBERED)).append(taking)
        outcome = "failed: the page was stopped meanwhile"
        try:
            outcome = await asyncio.to_thread(self._create, taking)
        finally:
            with contextlib.suppress(NotNoted):  # it is done, or it failed: the line is lost
                await self.note(who, "savepoint", taking.job, arguments, outcome)
            self._watch.forget()
            taking.state = "done" if taking.made else "failed"  # who sees it sees the rest, too
        return taking

    def _create(self, taking: Taking) -> str:
        """In a process of its own: it reads gigabytes beside a job that goes on."""
        command = [*_ONCEFLOW, "savepoint", "create", taking.job, f"--home={self._home}", "--json"]
        command += [f"--name={taking.name}"] if taking.name else []
        taking.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the page, which lets it finish
        )
        with taking.process:
            out, err = taking.process.communicate()
        try:
            if taking.process.returncode == 0:
                taking.made = json.loads(out)
                taking.name = str(taking.made["name"])
                return f"done: savepoint {taking.name}"
            said = json.loads(err.splitlines()[-1])
            taking.error = Failed(said["message"], hint=said["hint"], kind=said["kind"])
        except (ValueError, KeyError, IndexError, TypeError):
            code = taking.process.returncode
            taking.error = Failed(f"the command ended with {code} and said nothing", kind="Ended")
        return f"failed: {taking.says}"

    async def close(self) -> None:
        """The page stops: what is nearly there may finish. What is ended leaves nothing: the next
        one sweeps it."""
        if not self._running:
            return
        tasks = set(self._running.values())
        _, late = await asyncio.wait(tasks, timeout=_PATIENCE)
        for taking in (taking for taken in self._taken.values() for taking in taken):
            if taking.process is not None and taking.process.poll() is None:
                taking.process.terminate()
        if late:
            await asyncio.wait(late)


def savepoint_name(given: Any) -> str | None:
    """As a form or a body has it."""
    if given is None or given == "":
        return None
    if not isinstance(given, str):
        raise BadRequest(
            "the name of a savepoint is a text", hint="leave it out: then it is a time"
        )
    return given.strip() or None


def _cut(arguments: Any) -> Any:
    """Whoever asks chooses the texts, but not how long a line is."""
    if not isinstance(arguments, dict):
        return arguments
    return {
        name: value[:_LONGEST] if isinstance(value, str) else value
        for name, value in arguments.items()
    }
