"""The HTTP API under `/api`: what the page shows, in the same shapes as the commands' `--json`.

Everything here only reads. An error is the object that a command with `--json` writes, with a
status that fits, and never a stack. `openapi.py` describes each route.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

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
from onceflow.page import metrics
from onceflow.page.openapi import document
from onceflow.page.sse import Live, Stream
from onceflow.page.watch import Watch
from onceflow.store.names import check_name

Endpoint = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)
_STATUS: tuple[tuple[type[OnceflowError], int], ...] = (
    (JobError, 404),
    (LeaseHeld, 409),
    (Fenced, 409),
    (Damaged, 500),
    (CheckpointRefused, 500),
    (TargetError, 502),
    (PublishFailed, 503),
    (ServerSilent, 503),
)


def routes(watch: Watch, live: Live | None = None) -> list[Route]:
    """All that reads. `live`: of the page, so that streams end with it."""
    streams = live or Live()

    async def jobs(_: Request) -> Response:
        return _json(await watch.jobs_json())

    async def job(request: Request) -> Response:
        return _json(await watch.job_json(_named(request, "job")))

    async def epoch(request: Request) -> Response:
        number = request.path_params["epoch"]
        if not re.fullmatch(r"\d{1,18}", number):
            raise BadRequest(f"{number!r} is not an epoch", hint="a number, as in /epochs/12")
        return JSONResponse(await watch.epoch(_named(request, "job"), int(number)))

    async def state(request: Request) -> Response:
        return JSONResponse(await watch.state(_named(request, "job")))

    async def ledgers(request: Request) -> Response:
        return JSONResponse(await watch.ledgers(_named(request, "job")))

    async def lineages(request: Request) -> Response:
        return JSONResponse(await watch.lineages(_named(request, "job")))

    async def savepoints(request: Request) -> Response:
        return JSONResponse(await watch.savepoints(_named(request, "job")))

    async def boards(_: Request) -> Response:
        return JSONResponse(await watch.boards())

    async def board(request: Request) -> Response:
        return JSONResponse(await watch.board(_named(request, "board")))

    async def verify(_: Request) -> Response:
        return JSONResponse(await watch.verify_runs())

    async def verify_run(request: Request) -> Response:
        return JSONResponse(await watch.verify_run(_named(request, "run")))

    async def openapi(_: Request) -> Response:
        return JSONResponse(document())

    async def events(request: Request) -> Response:
        name = request.query_params.get("job")
        if streams.full:
            raise TooMany("too many look at this page already", hint="close one that looks")
        if name is None:
            return Stream(streams, "/api/events", _live("jobs", watch.jobs_json))
        named = checked("job", name)
        await watch.job(named)  # refused before anything is streamed
        return Stream(streams, f"/api/events/{named}", _live("job", lambda: watch.job_json(named)))

    async def prometheus(_: Request) -> Response:
        return Response(await watch.metrics(), headers={"Content-Type": metrics.CONTENT_TYPE})

    found = {
        "/api/jobs": jobs,
        "/api/jobs/{job}": job,
        "/api/jobs/{job}/epochs/{epoch}": epoch,
        "/api/jobs/{job}/state": state,
        "/api/jobs/{job}/ledgers": ledgers,
        "/api/jobs/{job}/lineages": lineages,
        "/api/jobs/{job}/savepoints": savepoints,
        "/api/boards": boards,
        "/api/boards/{board}": board,
        "/api/verify": verify,
        "/api/verify/{run}": verify_run,
        "/api/openapi.json": openapi,
        "/api/events": events,
        "/metrics": prometheus,
    }
    return [Route(path, answering(to), methods=["GET"]) for path, to in found.items()]


class BadRequest(JobError):
    """What was asked for cannot be."""


class TooMany(OnceflowError):
    """No more at once."""

    retryable = True


def answering(endpoint: Endpoint) -> Endpoint:
    """The same, with errors as JSON: whatever happens, a client reads what it can parse."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except OnceflowError as error:
            return refused(error)
        except Exception:  # the edge
            _log.exception("%s %s failed", request.method, request.url.path)
            said = OnceflowError("this could not be answered", hint="the log of the page says why")
            return refused(said)

    return answer


def refused(error: OnceflowError, status: int | None = None) -> JSONResponse:
    """The object that a command with `--json` writes."""
    return JSONResponse(error.as_json(), status_code=status or status_of(error))


def status_of(error: OnceflowError) -> int:
    if isinstance(error, BadRequest):
        return 400
    if isinstance(error, TooMany):
        return 503
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def _named(request: Request, kind: str) -> str:
    return checked(kind, request.path_params[kind])


def checked(kind: str, name: str) -> str:
    """What cannot even be a name is a request that is wrong."""
    try:
        return check_name(kind, name)
    except JobError as error:
        raise BadRequest(error.message, hint=error.hint) from None


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _live(
    name: str, make: Callable[[], Awaitable[bytes]]
) -> Callable[[], Awaitable[dict[str, str]]]:
    async def render() -> dict[str, str]:
        return {name: (await make()).decode()}

    return render
