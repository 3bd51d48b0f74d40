"""The forms of the page: the token, and a new savepoint. The token is checked and never kept."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from onceflow.errors import OnceflowError
from onceflow.page.actions import Actions, savepoint_name
from onceflow.page.errors import BadRequest, Refused, checked
from onceflow.page.guard import address, cookie, cookie_name, requester
from onceflow.page.views import Views

_FIELDS = 20
_OURS = re.compile(r"/[A-Za-z0-9_.-][A-Za-z0-9_./-]*|/")
_LIFE = 12 * 3600


class Forms:
    def __init__(self, views: Views, actions: Actions) -> None:
        self._views, self._actions, self._access = views, actions, actions.access

    def routes(self) -> list[Route]:
        return [
            Route("/access", self.ask, methods=["GET"]),
            Route("/access", self.unlock, methods=["POST"]),
            Route("/access/leave", self.leave, methods=["POST"]),
            Route("/jobs/{job}/savepoints", self.savepoint, methods=["POST"]),
        ]

    # -------------------------------------------------------------- the token

    async def ask(self, request: Request) -> Response:
        next_ = _ours(request.query_params.get("next"))
        return await self._views.page(request, "access.html", next=next_, refusal=None)

    async def unlock(self, request: Request) -> Response:
        async with self._actions.noting(request, "unlock"):
            form = await _form(request)
        next_ = _ours(form.get("next"))
        given = form.get("token", "").strip()
        refusal = await self._access.refuse_slowly(given, address(request))
        if refusal is not None:
            await self._actions.refused(requester(request), "unlock", None, None, refusal.message)
            answer = await self._views.page(
                request, "access.html", status=refusal.status, next=next_, refusal=refusal
            )
            return _retry_later(answer, refusal)
        await self._actions.note(requester(request), "unlock", None, None, "done")
        answer = RedirectResponse(next_, status_code=303)
        answer.set_cookie(
            cookie_name(request), self._access.open(), max_age=_LIFE, httponly=True,
            samesite="strict", secure=request.headers.get("x-forwarded-proto") == "https",
        )  # fmt: skip
        return answer

    async def leave(self, request: Request) -> Response:
        async with self._actions.noting(request, "lock"):
            form = await _form(request)
        refusal = self._refuse(request, form)
        if refusal is not None:
            return await self._refused(request, refusal)
        self._access.close(cookie(request))
        answer = RedirectResponse("/", status_code=303)
        answer.delete_cookie(cookie_name(request), httponly=True, samesite="strict")
        return answer

    # -------------------------------------------------------------- savepoints

    async def savepoint(self, request: Request) -> Response:
        """Begins it; the view shows how it goes on."""
        async with self._actions.noting(request, "savepoint"):
            job, form = checked("job", request.path_params["job"]), await _form(request)
            name = savepoint_name(form.get("name"))
        refusal = self._refuse(request, form)
        if refusal is not None:
            arguments = {"name": name}
            await self._actions.refused(
                requester(request), "savepoint", job, arguments, refusal.message
            )
            return await self._refused(request, refusal)
        try:
            await self._actions.take(job, name, requester(request))
        except OnceflowError as error:
            return await self._views.problem(request, error)
        if request.headers.get("hx-request") == "true":
            return Response(status_code=200, media_type="text/html")
        return RedirectResponse(f"/jobs/{job}/lineages", status_code=303)

    def _refuse(self, request: Request, form: dict[str, str]) -> Refused | None:
        session = self._access.session(cookie(request))
        return self._access.refuse_form(session, form.get("csrf", ""))

    async def _refused(self, request: Request, refusal: Refused) -> Response:
        return _retry_later(await self._views.problem(request, refusal), refusal)


def _retry_later(answer: Response, refusal: Refused) -> Response:
    if refusal.retry_after is not None:
        answer.headers["Retry-After"] = str(refusal.retry_after)
    return answer


def _ours(path: str | None) -> str:
    """An address on this page, and on no other."""
    return path if path is not None and _OURS.fullmatch(path) else "/"


async def _form(request: Request) -> dict[str, str]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise BadRequest("a form is expected", hint="use the form on the page")
    try:
        text = (await request.body()).decode()
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS))
    except ValueError:
        raise BadRequest("that form cannot be read", hint="use the form on the page") from None
