"""The views for people. Each is a whole page from the server; its parts are sent again when they
change. A part depends on the home alone, never on the viewer, so all viewers share it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from onceflow.errors import JobError, OnceflowError
from onceflow.page import plans
from onceflow.page.actions import Actions
from onceflow.page.boards import board_view
from onceflow.page.errors import TooManyViewers, headers_of, status_of
from onceflow.page.files import Row
from onceflow.page.graph import lineage_tree
from onceflow.page.guard import cookie
from onceflow.page.home_reader import HomeReader
from onceflow.page.html import Static, templates
from onceflow.page.shapes import BoardSummary
from onceflow.page.sse import Fragments, LiveViews, Stream
from onceflow.page.verify_runs import faults, run_view, violations
from onceflow.protocol.home import now
from onceflow.snapshots.shapes import RetainedEpochs
from onceflow.store.names import NAME, check_name
from onceflow.store.version import __version__

Parts = Callable[[str], Awaitable[Fragments]]

_REPORT_CSP = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'self'"
)
_THEMES = ("light", "dark")


class Views:
    def __init__(self, reader: HomeReader, actions: Actions, live: LiveViews) -> None:
        self._home, self._reader, self._live = reader.home, reader, live
        self._actions, self._access = actions, actions.access
        self.static = Static()
        self._templates = templates(self.static, version=__version__, home=str(self._home))

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
        self, request: Request, template: str, *, status: int = 200,
        headers: dict[str, str] | None = None, **values: Any,
    ) -> Response:  # fmt: skip
        """A whole page; or only its content, for a script that puts it into a page."""
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
        return HTMLResponse(self._render(template, **context), status_code=status, headers=headers)

    async def _boards(self) -> list[BoardSummary]:
        try:
            return await self._reader.boards()
        except OSError:
            return []

    async def problem(self, request: Request, error: OnceflowError) -> Response:
        status = status_of(error)
        return await self.page(
            request, "problem.html", status=status, headers=headers_of(error), number=status,
            says=error.message, hint=error.hint,
        )  # fmt: skip

    def _stream(self, parts: Parts) -> Callable[[Request], Awaitable[Response]]:
        async def stream(request: Request) -> Response:
            name = request.path_params.get("name", "")
            if name and not NAME.fullmatch(name):
                raise HTTPException(404)
            if self._live.is_full:
                raise TooManyViewers(
                    "the page has too many viewers",
                    hint="close another view of it; this one tries again by itself",
                )
            await parts(name)  # if it does not exist, no stream begins
            return Stream(self._live, request.url.path, lambda: parts(name))

        return stream

    # -------------------------------------------------------------- jobs

    async def parts_jobs(self, _: str = "") -> Fragments:
        found = await self._reader.jobs()
        states = ", ".join(f"{job['job']}: {job['state']}" for job in found)
        return {
            "announce": self._render("_announce.html", text=states or "no job has run here yet"),
            "jobs": self._render("_jobs.html", jobs=found),
        }

    async def jobs(self, request: Request) -> Response:
        parts = await self.parts_jobs()
        return await self.page(request, "jobs.html", parts=parts, live="/live/jobs", here="jobs")

    async def parts_job(self, name: str) -> Fragments:
        found = await self._reader.job(name)
        values = {"job": found, "marks": found["marks"], "name": name}
        return {
            "announce": self._render("_announce.html", text=f"{name}: {found['state']}"),
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
        states = await self._reader.state(name)
        return await self._of_job(request, "state.html", name, "now", states=states)

    async def ledgers(self, request: Request) -> Response:
        name = _name(request, "job")
        ledgers = await self._reader.ledgers(name)
        return await self._of_job(request, "ledgers.html", name, "now", ledgers=ledgers)

    async def epoch(self, request: Request) -> Response:
        name, number = _name(request, "job"), request.path_params["epoch"]
        epochs = await self._reader.epoch(name, number)
        return await self._of_job(request, "epoch.html", name, "now", epochs=epochs, number=number)

    # -------------------------------------------------------------- lineages

    async def parts_lineages(self, name: str) -> Fragments:
        await self._reader.job(name)
        requests = self._actions.requests(name)
        made = {  # before the tree is read, so that the tree has every savepoint that was created
            "announce": self._render(
                "_announce.html", text=requests[0].announcement if requests else ""
            ),
            "requests": self._render("_requests.html", requests=requests),
        }
        tree: list[Row] = []
        savepoints: list[Row] = []
        retained: list[RetainedEpochs] = []
        problem = None
        try:
            tree = lineage_tree(await self._reader.lineages(name))
            listed = await self._reader.savepoints(name)
            savepoints, retained = listed["savepoints"], listed["retained"]
        except JobError:  # a job that starts for the first time has none yet
            pass
        except OnceflowError as error:
            problem = str(error)
        return {
            **made,
            "tree": self._render(
                "_tree.html",
                name=name,
                problem=problem,
                tree=tree,
                sizes={s["name"]: s.get("bytes") for s in savepoints},
                broken=[s for s in savepoints if "error" in s],
            ),
            "retained": self._render("_retained.html", retained=retained),
        }

    async def lineages(self, request: Request) -> Response:
        name = _name(request, "job")
        parts = await self.parts_lineages(name)
        live = f"/live/jobs/{name}/lineages"
        return await self._of_job(
            request, "lineages.html", name, "lineages", parts=parts, live=live
        )

    async def plan(self, request: Request) -> Response:
        name, wanted = _name(request, "job"), plans.wanted(request.query_params)
        found, refused, hint = [], "", ""
        try:
            found = await self._reader.plan(
                (name, *wanted.values()), lambda: plans.plans(self._home, name, **wanted)
            )
        except JobError as error:
            refused, hint = error.message, error.hint
        what = f"Restore of savepoint {wanted['restore']}"
        if wanted["rollback"]:
            what = f"Rollback to {wanted['rollback']}"
        running = (await self._reader.job(name))["leader"] is not None
        return await self._of_job(
            request, "plan.html", name, "lineages", plans=found, what=what, running=running,
            refused=refused, hint=hint, stop=plans.stop_command(self._home, name),
        )  # fmt: skip

    # -------------------------------------------------------------- boards

    async def parts_board(self, name: str) -> Fragments:
        view = board_view(await self._reader.board(name))
        last = view["marks"][0].get("what") if view["marks"] else None
        return {
            "announce": self._render("_announce.html", text=last or "nothing has happened yet"),
            **{
                part: self._render(f"_{part}.html", **view)
                for part in ("verdict", "charts", "campaigns", "marks")
            },
        }

    async def board(self, request: Request) -> Response:
        name = _name(request, "board")
        parts, board = await self.parts_board(name), await self._reader.board(name)
        return await self.page(
            request, "board.html", name=name, board=board, parts=parts,
            live=f"/live/boards/{name}", here=f"board:{name}",
        )  # fmt: skip

    # -------------------------------------------------------------- verify

    async def parts_verify(self, _: str = "") -> Fragments:
        found = [run_view(run) for run in await self._reader.verify_runs()]
        return {"runs": self._render("_runs.html", runs=found)}

    async def verify(self, request: Request) -> Response:
        parts = await self.parts_verify()
        return await self.page(
            request, "verify.html", parts=parts, live="/live/verify", here="verify"
        )

    async def parts_run(self, name: str) -> Fragments:
        run = await self._reader.verify_run(name)
        view = run_view(run)
        return {
            "announce": self._render("_announce.html", text=view["words"]),
            "run": self._render("_run.html", run=view, violations=violations(run)),
            "faults": self._render("_faults.html", faults=faults(run)),
            "report": self._render("_report.html", run=view),
        }

    async def run(self, request: Request) -> Response:
        name = _name(request, "run")
        parts = await self.parts_run(name)
        return await self.page(
            request, "run.html", name=name, parts=parts, live=f"/live/verify/{name}", here="verify"
        )

    async def report(self, request: Request) -> Response:
        """A file of its own that gets nothing of the page: no script, no address, no cookie."""
        name = _name(request, "run")
        path = self._home / "_verify" / name / "report.html"
        if not (await self._reader.verify_run(name))["report"]:
            raise HTTPException(404)
        headers = {"Content-Security-Policy": _REPORT_CSP, "X-Frame-Options": "SAMEORIGIN"}
        if "download" in request.query_params:
            headers["Content-Disposition"] = f'attachment; filename="{name}.html"'
        return FileResponse(path, media_type="text/html", headers=headers)


def _name(request: Request, kind: str) -> str:
    """A name in the address; if it cannot be one, there is nothing of that name."""
    return check_name(kind, request.path_params[kind])
