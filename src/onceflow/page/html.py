"""Templates, and the static files of the page: scripts, styles, the icon.

The address of a file contains its hash, so a browser may keep it for ever and never has an old one.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from onceflow.harness import charts
from onceflow.page import formatting
from onceflow.page.boards import budget_bar
from onceflow.page.rates import iso
from onceflow.page.timeline import timeline

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_EVER = "public, max-age=31536000, immutable"


class Static:
    """All static files, in memory: they are few and small."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, str]] = {}  # name -> content, hash
        self._read(resources.files("onceflow.page") / "static", "")

    def _read(self, folder: Traversable, at: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                self._read(entry, f"{at}{entry.name}/")
            elif _type(entry.name):
                data = entry.read_bytes()
                self._files[at + entry.name] = (data, hashlib.sha256(data).hexdigest()[:16])

    def url(self, name: str) -> str:
        return f"/static/{self._files[name][1]}/{name}"

    async def serve(self, request: Request) -> Response:
        name, given = request.path_params["name"], request.path_params["digest"]
        data, digest = self._files.get(name, (b"", ""))
        if not digest or given != digest:
            raise HTTPException(404)
        headers = {"Cache-Control": _FOR_EVER, "ETag": f'"{digest}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=_type(name), headers=headers)


def _type(name: str) -> str | None:
    return next((kind for ending, kind in _TYPES.items() if name.endswith(ending)), None)


def templates(static: Static, **globals_: Any) -> Environment:
    found = Environment(
        loader=PackageLoader("onceflow.page"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        formatting.FILTERS,
        sparkline=sparkline,
        timeline=timeline,
        fan=lambda count, inwards: Markup(charts.fan(count, inwards=inwards)),
        groups=groups,
        budget_bar=budget_bar,
        iso=lambda milliseconds: iso(milliseconds / 1000),
    )
    found.globals.update(
        static=static.url, steps=formatting.STEPS, signs=formatting.MARKS, **globals_
    )
    return found


def sparkline(values: list[float]) -> Markup:
    """Rows a second of the last two minutes."""
    now, most = formatting.rate(values[-1]), formatting.rate(max(values))
    says = f"rows published a second over the last two minutes: now {now}, at most {most}"
    return Markup(charts.sparkline(values, says))


def groups(step: dict[str, Any]) -> Markup:
    """How evenly the rows of a keyed step are spread over its key groups."""
    found = step.get("by_group") or []
    bars = [
        (
            group["rows"],
            f"key group {group['group']}: {formatting.rows(group['rows'])}, "
            f"{formatting.size(group['bytes'])}",
        )
        for group in found
    ]
    most = max((rows for rows, _ in bars), default=0)
    says = f"rows in each of {len(found)} key groups, at most {formatting.rows(most)}"
    return Markup(charts.bar_chart(bars, says))
