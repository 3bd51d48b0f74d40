"""What is posted: the token, and a savepoint, by a form of the page or by a program."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from onceflow.errors import OnceflowError
from onceflow.page import api, plans
from onceflow.page.access import Access, Refusal
from onceflow.page.actions import Actions, Busy, Taking, savepoint_name
from onceflow.page.guard import address, cookie, cookie_name, who
from onceflow.page.views import Views
from onceflow.page.watch import Watch

_FIELDS = 20
_OURS = re.compile(r"/[A-Za-z0-9_.-][A-Za-z0-9_./-]*|/")
_LIFE = 12 * 3600


class Refused(OnceflowError):
    """Who asks may not do it."""


class Forms:
    """The token is asked for, checked, and never kept."""

    def __init__(self, views: Views, watch: Watch, access: Access, actions: Actions) -> None:
        self._views, self._watch, self._access, self._actions = views, watch, access, actions

    def routes(self) -> list[Route]:
        return [
            Route("/access", self.ask, methods=["GET"]),
            Route("/access", self.unlock, methods=["POST"]),
            Route("/access/leave", self.leave, methods=["POST"]),
            Route("/jobs/{job}/savepoints", self.savepoint, methods=["POST"]),
            Route(
                "/api/jobs/{job}/savepoints", api.answering(self.api_savepoint), methods=["POST"]
            ),
            Route("/api/jobs/{job}/plan", api.answering(self.api_plan), methods=["GET"]),
        ]

    # -------------------------------------------------------------- the token

    async def ask(self, request: Request) -> Response:
        next_ = _ours(request.query_params.get("next"))
        return await self._views.page(request, "access.html", next=next_, refusal=None)

    async def unlock(self, request: Request) -> Response:
        async with self._noting(request, "unlock"):
            form = await _form(request)
        next_ = _ours(form.get("next"))
        refusal = await self._refuse_token(request, form.get("token", "").strip())
        if refusal is None:
            await self._actions.note(who(request), "unlock", None, None, "done")
        else:
            await self._actions.refused(who(request), "unlock", None, None, refusal.says)
            answer = await self._views.page(
                request, "access.html", status=refusal.status, next=next_, refusal=refusal
            )
            return _later(answer, refusal)
        answer = RedirectResponse(next_, status_code=303)
        answer.set_cookie(
            cookie_name(request), self._access.open(), max_age=_LIFE, httponly=True,
            samesite="strict", secure=request.headers.get("x-forwarded-proto") == "https",
        )  # fmt: skip
        return answer

    async def leave(self, request: Request) -> Response:
        async with self._noting(request, "lock"):
            form = await _form(request)
        refusal = self._access.refuse_form(
            self._access.session(cookie(request)), form.get("csrf", "")
        )
        if refusal is not None:
            return await self._refused(request, refusal)
        self._access.close(cookie(request))
        answer = RedirectResponse("/", status_code=303)
        answer.delete_cookie(cookie_name(request), httponly=True, samesite="strict")
        return answer

    async def _refuse_token(self, request: Request, given: str) -> Refusal | None:
        refusal = self._access.refuse_token(given, address(request))
        if refusal is not None and given:
            await asyncio.sleep(self._access.slow_s)
        return refusal

    # -------------------------------------------------------------- savepoints

    async def savepoint(self, request: Request) -> Response:
        """By a form. It goes on in the background; the view shows how."""
        async with self._noting(request, "savepoint"):
            job, form = _job(request), await _form(request)
            name = savepoint_name(form.get("name"))
        refusal = self._access.refuse_form(
            self._access.session(cookie(request)), form.get("csrf", "")
        )
        if refusal is not None:
            await self._note_refused(request, job, name, refusal)
            return await self._refused(request, refusal)
        try:
            await self._actions.take(job, name, who(request))
        except OnceflowError as error:
            return await self._views.problem(request, _status(error), error.message, error.hint)
        if request.headers.get("hx-request") == "true":
            return Response(status_code=200, media_type="text/html")
        return RedirectResponse(f"/jobs/{job}/lineages", status_code=303)

    async def api_savepoint(self, request: Request) -> Response:
        """By a program, which waits for it."""
        async with self._noting(request, "savepoint"):
            job, body = _job(request), await _body(request)
            name = savepoint_name(body.get("name"))
        refusal = await self._refuse_api(request)
        if refusal is not None:
            await self._note_refused(request, job, name, refusal)
            error = Refused(refusal.says, hint=refusal.hint)
            return _later(api.refused(error, refusal.status), refusal)
        try:
            taking: Taking = await asyncio.shield(await self._actions.take(job, name, who(request)))
        except OnceflowError as error:
            return api.refused(error, _status(error))
        if taking.error is not None:
            return JSONResponse(
                {**taking.error.as_json(), "kind": taking.error.kind}, _failed_status(taking)
            )
        return JSONResponse(taking.made)

    async def _refuse_api(self, request: Request) -> Refusal | None:
        token, session = request.headers.get("x-onceflow-token"), cookie(request)
        if token is None and session is not None:
            csrf = request.headers.get("x-onceflow-csrf", "")
            return self._access.refuse_form(self._access.session(session), csrf)
        return await self._refuse_token(request, token or "")

    async def api_plan(self, request: Request) -> Response:
        job = _job(request)
        asked = {key: request.query_params.get(key, "").strip() for key in ("restore", "rollback")}
        published = request.query_params.get("published", "rewind")
        found = await self._watch.plan(
            (job, *asked.values(), published),
            lambda: plans.plan(self._watch.home, job, **asked, published=published),
        )
        return JSONResponse(found)

    # -------------------------------------------------------------- refusing

    async def _note_refused(
        self, request: Request, job: str, name: str | None, refusal: Refusal
    ) -> None:
        arguments = {"name": name}
        await self._actions.refused(who(request), "savepoint", job, arguments, refusal.says)

    @contextlib.asynccontextmanager
    async def _noting(self, request: Request, action: str) -> AsyncIterator[None]:
        """What cannot be read is refused, and written down as such."""
        try:
            yield
        except api.BadRequest as error:
            job = request.path_params.get("job", "")[:100] or None
            await self._actions.refused(who(request), action, job, None, error.message)
            raise

    async def _refused(self, request: Request, refusal: Refusal) -> Response:
        answer = await self._views.problem(request, refusal.status, refusal.says, refusal.hint)
        return _later(answer, refusal)


def _job(request: Request) -> str:
    return api.checked("job", request.path_params["job"])


def _later(answer: Response, refusal: Refusal) -> Response:
    if refusal.retry_after is not None:
        answer.headers["Retry-After"] = str(refusal.retry_after)
    return answer


def _status(error: OnceflowError) -> int:
    return 409 if isinstance(error, Busy) else api.status_of(error)


def _failed_status(taking: Taking) -> int:
    taken = taking.error is not None and taking.error.kind == "JobError"
    return 409 if taken else 500


def _ours(path: str | None) -> str:
    """An address on this page, and on no other."""
    return path if path is not None and _OURS.fullmatch(path) else "/"


async def _form(request: Request) -> dict[str, str]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise api.BadRequest("a form is expected", hint="use the one on the page")
    try:
        text = (await request.body()).decode()
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS))
    except ValueError:
        raise api.BadRequest("that form cannot be read", hint="use the one on the page") from None


async def _body(request: Request) -> dict[str, Any]:
    """A JSON object, or nothing."""
    data = await request.body()
    if not data.strip():
        return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise api.BadRequest("the body is not a JSON object", hint='such as {"name": "monday"}')
    return found
