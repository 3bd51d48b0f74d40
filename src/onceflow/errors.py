"""Every error that onceflow raises on purpose. Each says how to fix it.

    OnceflowError
    ├── JobError             the job file or what it declares is wrong
    ├── SessionRefused       a Spark session whose settings would break a guarantee
    ├── SetupError           Java, Spark or the machine is not what the job needs
    │   └── StagingDiffers   staged files are not what the tasks of the epoch wrote
    ├── LeaseHeld            another driver leads this job
    ├── Fenced               a newer driver has replaced this one, which must stop
    ├── Damaged              a file of onceflow is truncated, altered or missing
    ├── CheckpointRefused    Spark's checkpoint is not the one that this lineage made
    ├── TargetError          the target cannot take this output
    │   ├── SchemaMismatch   its columns differ
    │   ├── TargetForeign    it belongs to something else
    │   └── TargetBehind     its ledger is behind what was published, so it was set back
    ├── BadInput             a row of the input cannot be parsed
    │   └── OutOfRange       the rows asked for are gone, or not there yet
    ├── BadRows              an output cannot take some rows of an epoch
    ├── ProcessFailed        a keyed process raised, or returned what does not fit
    ├── RowsDiffer           an epoch that was run again has other rows than before
    ├── PlanChanged          Spark planned another range than the one that follows
    ├── PublishFailed        nothing became visible, so a retry is safe
    │   └── TargetAway       the server of the target does not answer, or refuses connections
    ├── PublishUnknown       the reply was lost; the ledger says what happened
    ├── ServerSilent         a server does not answer
    ├── NotStopped           a job has not stopped in time, or not at the end of an epoch
    └── DiskFull             no space is left, and nothing was decided

`retryable` tells the supervisor whether a retry can help. `away` tells it that a server must answer
again first, so that it tries until the server does.
"""

from __future__ import annotations

from typing import Any


class OnceflowError(Exception):
    """Root of all errors. `hint` names the fix; a command returns `exit_code`."""

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
        """As commands with `--json` and the HTTP API write it."""
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
