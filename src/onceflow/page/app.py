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
from onceflow.page import api
from onceflow.page.access import Access, Audit, Refusal
from onceflow.page.actions import Actions
from onceflow.page.forms import Forms, Refused
from onceflow.page.guard import READING, Guard, Hosts, who
from onceflow.page.sse import Live
from onceflow.page.views import Views
from onceflow.page.watch import Watch

_SAYS = {
    404: ("there is nothing here", "the address may be of a job that is under another home"),
    405: ("that cannot be done here", ""),
    500: ("this could not be answered", "the log of the page says why"),
}


def create(
    home: str | os.PathLike[str],
    *,
    token: str | None,
    host: str = "127.0.0.1",
    allow_hosts: Iterable[str] = (),
    live: Live | None = None,
) -> Starlette:
    """The page of a home. `token` None: nothing can be done through it."""
    root = Path(os.path.abspath(home))
    live = live or Live()
    watch, access = Watch(root), Access(token)
    actions = Actions(root, watch, Audit(root))
    views = Views(root, watch, access, actions, live)
    forms = Forms(views, watch, access, actions)

    async def refused(request: Request, refusal: Refusal) -> Response:
        """Without a word about the home: the one who asks may be another site."""
        if request.method not in READING:
            what = {"path": request.url.path}
            await actions.refused(who(request), request.method[:20], None, what, refusal.says)
        if _is_api(request):
            return api.refused(Refused(refusal.says, hint=refusal.hint), refusal.status)
        text = f"{refusal.says}\n{refusal.hint}".strip() + "\n"
        return PlainTextResponse(text, refusal.status)

    async def failed(request: Request, error: Exception) -> Response:
        """Whatever happens: words, never a stack."""
        status, says, hint = 500, *_SAYS[500]
        if isinstance(error, OnceflowError):
            status, says, hint = api.status_of(error), error.message, error.hint
        elif isinstance(error, HTTPException):
            status = error.status_code
            says, hint = _SAYS.get(status, (error.detail, ""))
        if _is_api(request):
            return api.refused(Refused(says, hint=hint), status)
        return await views.problem(request, status, says, hint)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        live.close()
        await actions.close()

    handlers: Any = {OnceflowError: failed, HTTPException: failed}
    guard = Middleware(Guard, hosts=Hosts(host, allow_hosts), refused=refused, failed=failed)
    app = Starlette(
        routes=[*views.routes(), *forms.routes(), *api.routes(watch, live)],
        middleware=[guard],
        exception_handlers=handlers,
        lifespan=lifespan,
    )
    app.state.access, app.state.live, app.state.watch = access, live, watch
    return app


def _is_api(request: Request) -> bool:
    return request.url.path.startswith(("/api", "/metrics"))
