"""Errors of requests, and the HTTP status of every error."""

from __future__ import annotations

from onceflow.errors import (
    CheckpointRefused,
    Damaged,
    Fenced,
    JobError,
    LeaseHeld,
    OnceflowError,
    PublishFailed,
    ServerSilent,
    TargetError,
)
from onceflow.store.names import check_name


class Refused(OnceflowError):
    """The page does not answer this request, or does not do it for this person."""

    def __init__(
        self, message: str, *, hint: str = "", status: int = 403, retry_after: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.status, self.retry_after = status, retry_after


class BadRequest(JobError):
    """A value of the request cannot be used."""


class TooManyViewers(OnceflowError):
    retryable = True
    retry_after = 10


class Busy(OnceflowError):
    """A savepoint of the job is being created already."""

    retryable = True


class AuditFailed(OnceflowError):
    """The audit log cannot be written, so nothing was done."""


class CommandFailed(OnceflowError):
    """A command that the page started ended with an error; `kind` is the error's own."""

    def __init__(self, message: str, *, hint: str = "", kind: str = "") -> None:
        super().__init__(message, hint=hint)
        self.kind = kind


_STATUS: tuple[tuple[type[OnceflowError], int], ...] = (
    (BadRequest, 400),
    (JobError, 404),
    (Busy, 409),
    (LeaseHeld, 409),
    (Fenced, 409),
    (Damaged, 500),
    (CheckpointRefused, 500),
    (TargetError, 502),
    (TooManyViewers, 503),
    (PublishFailed, 503),
    (ServerSilent, 503),
)


def status_of(error: OnceflowError) -> int:
    if isinstance(error, Refused):
        return error.status
    if isinstance(error, CommandFailed):
        return 409 if error.kind == "JobError" else 500
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def headers_of(error: OnceflowError) -> dict[str, str]:
    """`Retry-After`, if the error tells how many seconds to wait."""
    seconds = getattr(error, "retry_after", None)
    return {} if seconds is None else {"Retry-After": str(seconds)}


def checked(kind: str, name: str) -> str:
    """The name; `BadRequest` if it cannot be one."""
    try:
        return check_name(kind, name)
    except JobError as error:
        raise BadRequest(error.message, hint=error.hint) from None
