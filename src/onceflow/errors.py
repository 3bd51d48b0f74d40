"""Every error that onceflow raises on purpose. Each says what to do about it.

    OnceflowError
    ├── JobError             the job file or what it declares is wrong
    ├── SessionRefused       a Spark session whose settings would break a guarantee
    ├── SetupError           Java, Spark or the machine is not what we need
    │   └── StagingDiffers   staged files are not what the tasks of the epoch wrote
    ├── LeaseHeld            another driver leads this job
    ├── Fenced               a newer driver leads this job; this one must stop
    ├── Damaged              a file of ours is truncated, altered or missing
    ├── CheckpointRefused    the checkpoint is not the one this lineage made
    ├── TargetError          the target cannot take this output
    │   ├── SchemaMismatch   its columns differ
    │   ├── TargetForeign    it belongs to something else
    │   └── TargetBehind     its ledger is behind what was published: it was set back
    ├── BadInput             a row of the input cannot be parsed
    │   └── OutOfRange       rows that were asked for are gone, or not there yet
    ├── BadRows              rows of an epoch that an output cannot take
    ├── ProcessFailed        a keyed process raised, or returned what does not fit
    ├── RowsDiffer           an epoch was run again, and its rows are not those that it had
    ├── PlanChanged          Spark planned something else than what follows; open again
    ├── PublishFailed        nothing became visible; safe to try again
    │   └── TargetAway       the target's server does not answer, or takes nobody; it may come back
    ├── PublishUnknown       it cannot be known; look at the ledger, never guess
    ├── ServerSilent         a server does not answer; it may come back
    ├── NotStopped           a job that was asked to stop has not, or not at an epoch's end
    └── DiskFull             no space left; nothing was decided

`retryable` tells the supervisor whether opening the query again can mend it; `away`, that a server
must come back for that, so that it is tried until it does.
"""

from __future__ import annotations

from typing import Any


class OnceflowError(Exception):
    """Root of all errors. `hint` names the fix; `exit_code` is what a command returns."""

    exit_code = 1
    retryable = False
    away = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.hint}" if self.hint else self.message

    def as_json(self) -> dict[str, Any]:
        """As commands with `--json` and the HTTP API tell it."""
        return {
            "event": "error", "kind": type(self).__name__, "message": self.message,
            "hint": self.hint, "exit_code": self.exit_code, "retryable": self.retryable,
        }  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[OnceflowError], message: str, hint: str) -> OnceflowError:
    return kind(message, hint=hint)


class JobError(OnceflowError):
    exit_code = 2


class SessionRefused(OnceflowError):
    exit_code = 2


class SetupError(OnceflowError):
    exit_code = 4


class StagingDiffers(SetupError):
    pass


class LeaseHeld(OnceflowError):
    exit_code = 5


class Fenced(OnceflowError):
    exit_code = 6


class Damaged(OnceflowError):
    exit_code = 7


class CheckpointRefused(OnceflowError):
    exit_code = 7


class TargetError(OnceflowError):
    exit_code = 8


class SchemaMismatch(TargetError):
    pass


class TargetForeign(TargetError):
    pass


class TargetBehind(TargetError):
    pass


class BadInput(OnceflowError):
    exit_code = 9


class OutOfRange(BadInput):
    pass


class BadRows(OnceflowError):
    exit_code = 9


class ProcessFailed(OnceflowError):
    exit_code = 9


class RowsDiffer(OnceflowError):
    exit_code = 9


class PlanChanged(OnceflowError):
    exit_code = 75
    retryable = True


class PublishFailed(OnceflowError):
    exit_code = 75
    retryable = True


class TargetAway(PublishFailed):
    away = True


class PublishUnknown(OnceflowError):
    exit_code = 75
    retryable = True


class ServerSilent(OnceflowError):
    exit_code = 75
    retryable = True
    away = True


class NotStopped(OnceflowError):
    exit_code = 75
    retryable = True


class DiskFull(OnceflowError):
    exit_code = 75
    retryable = True
