"""The views for people: each a whole page from the server, with parts that are renewed while one
looks. A part is made from the home alone, never from who looks, so all viewers share it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from onceflow.errors import JobError, OnceflowError
from onceflow.page import boarded, plans, runs
from onceflow.page.access import Access
from onceflow.page.actions import Actions
from onceflow.page.guard import cookie
from onceflow.page.html import Static, templates
from onceflow.page.sse import Fragments, Live, Stream
from onceflow.page.tree import branches
from onceflow.page.watch import Watch
from onceflow.protocol.home import now
from onceflow.store.names import NAME, check_name
from onceflow.store.version import __version__

Row = dict[str, Any]
Parts = Callable[[str], Awaitable[Fragments]]

_REPORT_CSP = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'self'"
)
_THEMES = ("light", "dark")


class Views:
    def __init__(self, home: Path, watch: Watch, access: Access, actions: Actions, live: Live):
        self._home, self._watch, self._access = home, watch, access
        self._actions, self._live = actions, live
        self.static = Static()
        self._templates = templates(self.static, version=__version__, home=str(home))

    def routes(self) -> list[Route]:
        pages = {
            "/": self.jobs,
            "/jobs/{job}": self.job,
            "/jobs/{job}/lineages": self.lineages,
            "/jobs/{job}/state": self.state,
            "/jobs/{job}/ledgers": self.ledgers,
            "/jobs/{job}/epochs/{epoch:int}": self.epoch,
            "/jobs/{job}/plan": self.plan,
            "/boards/{board}": self.board,
            "/verify": self.verify,
            "/verify/{run}": self.run,
            "/verify/{run}/report": self.report,
            "/static/{digest}/{name:path}": self.static.serve,
        }
        lives: dict[str, Parts] = {
            "/live/jobs": self.parts_jobs,
            "/live/jobs/{name}": self.parts_job,
            "/live/jobs/{name}/lineages": self.parts_lineages,
            "/live/boards/{name}": self.parts_board,
            "/live/verify": self.parts_verify,
            "/live/verify/{name}": self.parts_run,
        }
        return [Route(path, to, methods=["GET"]) for path, to in pages.items()] + [
            Route(path, self._stream(parts), methods=["GET"]) for path, parts in lives.items()
        ]

    # -------------------------------------------------------------- frame

    def _render(self, template: str, **values: Any) -> str:
        return self._templates.get_template(template).render(**values)

    async def page(
        self, request: Request, template: str, *, status: int = 200, **values: Any
    ) -> Response:
        """A whole page; or its content alone, for a script that puts it into one."""
        theme = request.cookies.get("onceflow-theme")
        context: Row = {
            "session": self._access.session(cookie(request)),
            "read_only": self._access.read_only,
            "theme": theme if theme in _THEMES else None,
            "path": request.url.path,
            "now": now(),
            "bare": request.headers.get("hx-request") == "true",
            "boards": await self._boards(),
            "live": None,
            "here": "",
            **values,
        }
        return HTMLResponse(self._render(template, **context), status_code=status)

    async def _boards(self) -> list[Row]:
        try:
            return await self._watch.boards()
        except OSError:
            return []

    async def problem(
        self, request: Request, status: int, says: str, hint: str = "", **headers: str
    ) -> Response:
        answer = await self.page(
            request, "problem.html", status=status, number=status, says=says, hint=hint
        )
        answer.headers.update({name.replace("_", "-"): value for name, value in headers.items()})
        return answer

    def _stream(self, parts: Parts) -> Callable[[Request], Awaitable[Response]]:
        async def stream(request: Request) -> Response:
            name = request.path_params.get("name", "")
            if name and not NAME.fullmatch(name):
                raise HTTPException(404)
            if self._live.full:
                return await self.problem(
                    request, 503, "too many look at this page already",
                    "close one that looks; this one tries again by itself", Retry_After="10",
                )  # fmt: skip
            await parts(name)  # refused before anything is streamed
            return Stream(self._live, request.url.path, lambda: parts(name))

        return stream

    # -------------------------------------------------------------- jobs

    async def parts_jobs(self, _: str = "") -> Fragments:
        found = await self._watch.jobs()
        states = ", ".join(f"{job['job']}: {job['state']}" for job in found)
        return {
            "announce": self._render("_said.html", text=states or "no job has run here yet"),
            "jobs": self._render("_jobs.html", jobs=found),
        }

    async def jobs(self, request: Request) -> Response:
        parts = await self.parts_jobs()
        return await self.page(request, "jobs.html", parts=parts, live="/live/jobs", here="jobs")

    async def parts_job(self, name: str) -> Fragments:
        found = await self._watch.job(name)
        values = {"job": found, "marks": found["marks"], "name": name}
        return {
            "announce": self._render("_said.html", text=f"{name}: {found['state']}"),
            **{
                part: self._render(f"_{part}.html", **values)
                for part in ("figures", "flow", "epochs", "happened")
            },
        }

    async def job(self, request: Request) -> Response:
        name = _name(request, "job")
        parts = await self.parts_job(name)
        return await self._of_job(
            request, "job.html", name, "now", parts=parts, live=f"/live/jobs/{name}"
        )

    async def _of_job(
        self, request: Request, template: str, name: str, tab: str, **values: Any
    ) -> Response:
        return await self.page(request, template, name=name, tab=tab, here="jobs", **values)

    async def state(self, request: Request) -> Response:
        name = _name(request, "job")
        states = await self._watch.state(name)
        return await self._of_job(request, "state.html", name, "now", states=states)

    async def ledgers(self, request: Request) -> Response:
        name = _name(request, "job")
        ledgers = await self._watch.ledgers(name)
        return await self._of_job(request, "ledgers.html", name, "now", ledgers=ledgers)

    async def epoch(self, request: Request) -> Response:
        name, number = _name(request, "job"), request.path_params["epoch"]
        epochs = await self._watch.epoch(name, number)
        return await self._of_job(request, "epoch.html", name, "now", epochs=epochs, number=number)

    # -------------------------------------------------------------- lineages

    async def parts_lineages(self, name: str) -> Fragments:
        await self._watch.job(name)
        taking = self._actions.taken(name)
        taken = {  # before the tree is read: one that is said to be taken is in it
            "announce": self._render("_said.html", text=taking[0].told if taking else ""),
            "taking": self._render("_taking.html", taking=taking),
        }
        tree: list[Row] = []
        listed: Row = {"savepoints": [], "retained": []}
        problem = None
        try:
            tree, listed = await self._watch.lineages(name), await self._watch.savepoints(name)
        except JobError:  # a job that starts for the first time has none yet
            pass
        except OnceflowError as error:
            problem = str(error)
        return {
            **taken,
            "tree": self._render(
                "_tree.html",
                name=name,
                problem=problem,
                tree=branches(tree),
                sizes={s["name"]: s.get("bytes") for s in listed["savepoints"]},
                broken=[s for s in listed["savepoints"] if "error" in s],
            ),
            "retained": self._render("_retained.html", retained=listed["retained"]),
        }

    async def lineages(self, request: Request) -> Response:
        name = _name(request, "job")
        parts = await self.parts_lineages(name)
        live = f"/live/jobs/{name}/lineages"
        return await self._of_job(
            request, "lineages.html", name, "lineages", parts=parts, live=live
        )

    async def plan(self, request: Request) -> Response:
        name = _name(request, "job")
        asked = {key: request.query_params.get(key, "").strip() for key in ("restore", "rollback")}
        found, refused, hint = [], "", ""
        try:
            found = await self._watch.plan(
                (name, *asked.values()), lambda: plans.plans(self._home, name, **asked)
            )
        except JobError as error:
            refused, hint = error.message, error.hint
        what = f"Restore of savepoint {asked['restore']}"
        if asked["rollback"]:
            what = f"Rollback to {asked['rollback']}"
        running = (await self._watch.job(name))["leader"] is not None
        return await self._of_job(
            request, "plan.html", name, "lineages", plans=found, what=what, running=running,
            refused=refused, hint=hint, stop=plans.stop(self._home, name),
        )  # fmt: skip

    # -------------------------------------------------------------- boards

    async def parts_board(self, name: str) -> Fragments:
        shown = boarded.shown(await self._watch.board(name))
        told = shown["marks"][0].get("what") if shown["marks"] else None
        return {
            "announce": self._render("_said.html", text=told or "nothing has happened yet"),
            **{
                part: self._render(f"_{part}.html", **shown)
                for part in ("verdict", "charts", "campaigns", "marks")
            },
        }

    async def board(self, request: Request) -> Response:
        name = _name(request, "board")
        parts, board = await self.parts_board(name), await self._watch.board(name)
        return await self.page(
            request, "board.html", name=name, board=board, parts=parts,
            live=f"/live/boards/{name}", here=f"board:{name}",
        )  # fmt: skip

    # -------------------------------------------------------------- verify

    async def parts_verify(self, _: str = "") -> Fragments:
        found = [runs.told(run) for run in await self._watch.verify_runs()]
        return {"runs": self._render("_runs.html", runs=found)}

    async def verify(self, request: Request) -> Response:
        parts = await self.parts_verify()
        return await self.page(
            request, "verify.html", parts=parts, live="/live/verify", here="verify"
        )

    async def parts_run(self, name: str) -> Fragments:
        run = runs.told(await self._watch.verify_run(name))
        return {
            "announce": self._render("_said.html", text=run["words"]),
            "run": self._render("_run.html", run=run, violations=runs.violations(run)),
            "faults": self._render("_faults.html", faults=runs.faults(run)),
            "report": self._render("_report.html", run=run),
        }

    async def run(self, request: Request) -> Response:
        name = _name(request, "run")
        parts = await self.parts_run(name)
        return await self.page(
            request, "run.html", name=name, parts=parts, live=f"/live/verify/{name}", here="verify"
        )

    async def report(self, request: Request) -> Response:
        """A file of its own, which gets nothing of the page: no script, no address, no cookie."""
        name = _name(request, "run")
        path = self._home / "_verify" / name / "report.html"
        if not (await self._watch.verify_run(name))["report"]:
            raise HTTPException(404)
        headers = {"Content-Security-Policy": _REPORT_CSP, "X-Frame-Options": "SAMEORIGIN"}
        if "download" in request.query_params:
            headers["Content-Disposition"] = f'attachment; filename="{name}.html"'
        return FileResponse(path, media_type="text/html", headers=headers)


def _name(request: Request, kind: str) -> str:
    """A name of the address; what is not even one is not there."""
    return check_name(kind, request.path_params[kind])
