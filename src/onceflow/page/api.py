"""The HTTP API under `/api`, and `/metrics`. Answers have the shapes of `shapes.py`.

An error is the object that a command with `--json` writes, with a fitting status, and never a
stack trace. Only `POST …/savepoints` changes anything; it needs the token or a session.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onceflow.errors import OnceflowError
from onceflow.page import metrics, plans
from onceflow.page.actions import Actions, savepoint_name
from onceflow.page.errors import (
    BadRequest,
    CommandFailed,
    TooManyViewers,
    checked,
    headers_of,
    status_of,
)
from onceflow.page.guard import address, cookie
from onceflow.page.home_reader import HomeReader
from onceflow.page.openapi import Operation, document
from onceflow.page.shapes import (
    Board,
    BoardSummary,
    Job,
    JobSummary,
    Plan,
    Run,
    RunSummary,
)
from onceflow.page.sse import LiveViews, Stream
from onceflow.service.ledger_view import LedgerRow
from onceflow.snapshots.shapes import (
    Epoch,
    Json,
    Lineage,
    Savepoints,
    SavepointSummary,
    State,
)

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Api:
    """Without `actions` it only reads."""

    def __init__(
        self, reader: HomeReader, live: LiveViews | None = None, actions: Actions | None = None
    ) -> None:
        self._reader, self._live, self._actions = reader, live or LiveViews(), actions

    def routes(self) -> list[Route]:
        found = [
            Route(o.path, _answering(partial(o.handler, self)), methods=[o.method.upper()])
            for o in OPERATIONS
            if o.method == "get" or self._actions is not None
        ]
        return [*found, Route("/metrics", _answering(self.metrics), methods=["GET"])]

    # ------------------------------------------------------------ reading

    async def jobs(self, _: Request) -> list[JobSummary]:
        """All jobs of the home"""
        return await self._reader.jobs()

    async def job(self, request: Request) -> Job:
        """One job"""
        return await self._reader.job(_name(request, "job"))

    async def epoch(self, request: Request) -> list[Epoch]:
        """One epoch of each query that has it: as onceflow epoch show"""
        number = request.path_params["epoch"]
        if not re.fullmatch(r"\d{1,18}", number):
            raise BadRequest(f"{number!r} is not an epoch", hint="a number, as in /epochs/12")
        return await self._reader.epoch(_name(request, "job"), int(number))

    async def state(self, request: Request) -> list[State]:
        """Its state: as onceflow state list"""
        return await self._reader.state(_name(request, "job"))

    async def ledgers(self, request: Request) -> list[LedgerRow]:
        """What each target itself says is published: as onceflow ledger"""
        return await self._reader.ledgers(_name(request, "job"))

    async def lineages(self, request: Request) -> list[Lineage]:
        """Its lineages: as onceflow lineages"""
        return await self._reader.lineages(_name(request, "job"))

    async def savepoints(self, request: Request) -> Savepoints:
        """Savepoints and retained epochs: as onceflow savepoint list"""
        return await self._reader.savepoints(_name(request, "job"))

    async def plan(self, request: Request) -> Plan:
        """What a restore or a rollback would do, and the command: as onceflow restore --plan"""
        job, wanted = _name(request, "job"), plans.wanted(request.query_params)
        published = request.query_params.get("published", "rewind")
        return await self._reader.plan(
            (job, *wanted.values(), published),
            lambda: plans.plan(self._reader.home, job, **wanted, published=published),
        )

    async def boards(self, _: Request) -> list[BoardSummary]:
        """The boards of applications"""
        return await self._reader.boards()

    async def board(self, request: Request) -> Board:
        """One board"""
        return await self._reader.board(_name(request, "board"))

    async def verify_runs(self, _: Request) -> list[RunSummary]:
        """Runs of onceflow verify, the newest first"""
        return await self._reader.verify_runs()

    async def verify_run(self, request: Request) -> Run:
        """One run"""
        return await self._reader.verify_run(_name(request, "run"))

    async def openapi(self, _: Request) -> Json:
        """This document"""
        return document(OPERATIONS)

    async def events(self, request: Request) -> Stream:
        """All jobs, or one, sent again when something changes: events `jobs` or `job`, whose data
        is the answer of /api/jobs or /api/jobs/{job}. In between, `beat` tells that nothing has
        changed, and `stale` that the home cannot be read, and why"""
        name = request.query_params.get("job")
        if self._live.is_full:
            raise TooManyViewers("the page has too many viewers", hint="close another view of it")
        if name is None:
            return Stream(self._live, "/api/events", _fragment("jobs", self._reader.jobs))
        job = checked("job", name)
        await self._reader.job(job)  # if there is none, no stream begins
        return Stream(
            self._live, f"/api/events/{job}", _fragment("job", partial(self._reader.job, job))
        )

    async def metrics(self, request: Request) -> Response:
        text = metrics.exposition(request.headers.get("accept", ""))
        body = await self._reader.of_jobs(text.content_type, lambda home, _: text.encode(home.jobs))
        return Response(body, headers={"Content-Type": text.content_type})

    # ------------------------------------------------------------ acting

    async def make_savepoint(self, request: Request) -> SavepointSummary:
        """Create a savepoint: as onceflow savepoint create"""
        actions = cast(Actions, self._actions)
        async with actions.noting(request, "savepoint") as arguments:
            job, body = _name(request, "job"), await _body(request)
            name = arguments["name"] = savepoint_name(body.get("name"))
            token, session = request.headers.get("x-onceflow-token"), cookie(request)
            if token is None and session is not None:
                actions.access.check_form(session, request.headers.get("x-onceflow-csrf", ""))
            else:
                await actions.access.check_token(token or "", address(request))
        done = await asyncio.shield(await actions.take(job, name, request))
        if done.error is not None:
            raise done.error
        return cast(SavepointSummary, done.made)


OPERATIONS = (
    Operation("/api/jobs", Api.jobs),
    Operation("/api/jobs/{job}", Api.job),
    Operation("/api/jobs/{job}/epochs/{epoch}", Api.epoch),
    Operation("/api/jobs/{job}/state", Api.state),
    Operation("/api/jobs/{job}/ledgers", Api.ledgers, asks_targets=True),
    Operation("/api/jobs/{job}/lineages", Api.lineages),
    Operation("/api/jobs/{job}/savepoints", Api.savepoints),
    Operation("/api/jobs/{job}/savepoints", Api.make_savepoint, method="post"),
    Operation(
        "/api/jobs/{job}/plan",
        Api.plan,
        query={
            "restore": "a savepoint of the job",
            "rollback": "a retained epoch, or a time",
            "published": "rewind, skip or replay",
        },
        asks_targets=True,
    ),
    Operation("/api/boards", Api.boards),
    Operation("/api/boards/{board}", Api.board),
    Operation("/api/verify", Api.verify_runs),
    Operation("/api/verify/{run}", Api.verify_run),
    Operation("/api/openapi.json", Api.openapi),
    Operation("/api/events", Api.events, query={"job": "only this one"}),
)


def _answering(
    handler: Callable[[Request], Awaitable[Any]],
) -> Callable[[Request], Awaitable[Response]]:
    """The answer of the handler as JSON, or its error."""

    async def answer(request: Request) -> Response:
        try:
            found = await handler(request)
            return found if isinstance(found, Response) else _json(found)
        except OnceflowError as error:
            return failure(error)
        except Exception:  # the edge
            _log.exception("%s %s failed", request.method, request.url.path)
            return failure(
                OnceflowError("this could not be answered", hint="see the log of the page")
            )

    return answer


def failure(error: OnceflowError) -> Response:
    """An error as a command with `--json` writes it."""
    kind = {"kind": error.kind} if isinstance(error, CommandFailed) else {}
    return _json({**error.as_json(), **kind}, status_of(error), headers_of(error))


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def _name(request: Request, kind: str) -> str:
    return checked(kind, request.path_params[kind])


async def _body(request: Request) -> dict[str, Any]:
    """The JSON object in the body; an empty body is an empty object."""
    data = await request.body()
    if not data.strip():
        return {}
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest(
            "the body is not a JSON object", hint='such as {"name": "monday"}'
        ) from None


def _fragment(
    name: str, make: Callable[[], Awaitable[Any]]
) -> Callable[[], Awaitable[dict[str, str]]]:
    async def render() -> dict[str, str]:
        return {name: msgspec.json.encode(await make()).decode()}

    return render
