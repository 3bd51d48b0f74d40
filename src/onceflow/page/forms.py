"""The forms of the page: the token, and a new savepoint. The token is checked and never kept."""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from onceflow.page.access import LIFE
from onceflow.page.actions import Actions, savepoint_name
from onceflow.page.errors import BadRequest, Refused, checked, headers_of
from onceflow.page.guard import address, cookie, cookie_name
from onceflow.page.views import Views

_FIELDS = 20
_OURS = re.compile(r"/[A-Za-z0-9_.-][A-Za-z0-9_./-]*|/")


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
        next_ = "/"
        try:
            async with self._actions.noting(request, "unlock"):
                form = await _form(request)
                next_ = _ours(form.get("next"))
                await self._access.check_token(form.get("token", "").strip(), address(request))
        except Refused as refusal:
            return await self._views.page(
                request, "access.html", status=refusal.status, headers=headers_of(refusal),
                next=next_, refusal=refusal,
            )  # fmt: skip
        await self._actions.note(request, "unlock", None, None, "done")
        answer = RedirectResponse(next_, status_code=303)
        answer.set_cookie(
            cookie_name(request), self._access.open(), max_age=LIFE, httponly=True,
            samesite="strict", secure=request.headers.get("x-forwarded-proto") == "https",
        )  # fmt: skip
        return answer

    async def leave(self, request: Request) -> Response:
        async with self._actions.noting(request, "lock"):
            form = await _form(request)
        self._access.check_form(cookie(request), form.get("csrf", ""))
        self._access.close(cookie(request))
        answer = RedirectResponse("/", status_code=303)
        answer.delete_cookie(cookie_name(request), httponly=True, samesite="strict")
        return answer

    # -------------------------------------------------------------- savepoints

    async def savepoint(self, request: Request) -> Response:
        """Begins it; the view shows how it goes on."""
        async with self._actions.noting(request, "savepoint") as arguments:
            job, form = checked("job", request.path_params["job"]), await _form(request)
            name = arguments["name"] = savepoint_name(form.get("name"))
            self._access.check_form(cookie(request), form.get("csrf", ""))
        await self._actions.take(job, name, request)
        if request.headers.get("hx-request") == "true":
            return Response(status_code=200, media_type="text/html")
        return RedirectResponse(f"/jobs/{job}/lineages", status_code=303)


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
