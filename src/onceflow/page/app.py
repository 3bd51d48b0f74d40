"""The page as one application: views, forms, the API and metrics, behind the guard."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from onceflow.errors import OnceflowError
from onceflow.page.access import Access, Audit
from onceflow.page.actions import Actions
from onceflow.page.api import Api, failure
from onceflow.page.errors import Refused
from onceflow.page.forms import Forms
from onceflow.page.guard import READ_METHODS, AllowedHosts, Guard
from onceflow.page.home_reader import HomeReader
from onceflow.page.sse import LiveViews
from onceflow.page.views import Views

_SAYS = {
    404: ("there is nothing at this address", "the job may be under another home"),
    405: ("this address does not take that method", ""),
    500: ("this could not be answered", "see the log of the page"),
}


def create(
    home: str | os.PathLike[str],
    *,
    token: str | None,
    host: str = "127.0.0.1",
    allow_hosts: Iterable[str] = (),
    live: LiveViews | None = None,
) -> Starlette:
    """The page of a home. If `token` is None, nothing can be done through it."""
    root = Path(os.path.abspath(home))
    live = live or LiveViews()
    reader, access = HomeReader(root), Access(token)
    actions = Actions(root, reader, access, Audit(root))
    views = Views(reader, actions, live)

    async def refused(request: Request, refusal: Refused) -> Response:
        """Tells nothing about the home: another site may ask."""
        if request.method not in READ_METHODS:
            what = {"path": request.url.path}
            await actions.refused(request, request.method[:20], None, what, refusal.message)
        if _is_api(request):
            return failure(refusal)
        text = f"{refusal.message}\n{refusal.hint}".strip() + "\n"
        return PlainTextResponse(text, refusal.status)

    async def failed(request: Request, error: Exception) -> Response:
        """An error in words, never a stack trace."""
        if not isinstance(error, OnceflowError):
            status = error.status_code if isinstance(error, HTTPException) else 500
            detail = error.detail if isinstance(error, HTTPException) else ""
            says, hint = _SAYS.get(status, (detail, ""))
            error = Refused(says, hint=hint, status=status)
        return failure(error) if _is_api(request) else await views.problem(request, error)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        live.close()
        await actions.close()

    handlers: Any = {OnceflowError: failed, HTTPException: failed}
    guard = Middleware(Guard, hosts=AllowedHosts(host, allow_hosts), refused=refused, failed=failed)
    app = Starlette(
        routes=[
            *views.routes(),
            *Forms(views, actions).routes(),
            *Api(reader, live, actions).routes(),
        ],
        middleware=[guard],
        exception_handlers=handlers,
        lifespan=lifespan,
    )
    app.state.access, app.state.live, app.state.reader = access, live, reader
    return app


def _is_api(request: Request) -> bool:
    return request.url.path.startswith(("/api", "/metrics"))
