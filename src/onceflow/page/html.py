"""Templates, and the files that pages need: scripts, styles, the icon.

A file's address has its hash in it, so a browser keeps it for ever and never has an old one.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from onceflow.page import charts, words
from onceflow.page.times import iso

_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FOR_EVER = "public, max-age=31536000, immutable"
_LONGEST = 200  # characters of an offset


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
        name, asked = request.path_params["name"], request.path_params["digest"]
        data, digest = self._files.get(name, (b"", ""))
        if not digest or asked != digest:
            raise HTTPException(404)
        headers = {"Cache-Control": _FOR_EVER, "ETag": f'"{digest}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=_type(name), headers=headers)


def _type(name: str) -> str | None:
    return next((kind for ending, kind in _TYPES.items() if name.endswith(ending)), None)


def templates(static: Static, **everywhere: Any) -> Environment:
    found = Environment(
        loader=PackageLoader("onceflow.page"),
        autoescape=select_autoescape(),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        words.FILTERS,
        sparkline=charts.sparkline,
        timeline=charts.timeline,
        fan=fan,
        groups=groups,
        budget_bar=budget_bar,
        place=place,
        offset=offset,
        since=since,
        iso=lambda milliseconds: iso(milliseconds / 1000),
    )
    found.globals.update(static=static.url, steps=words.STEPS, signs=words.MARKS, **everywhere)
    return found


# ---------------------------------------------------------------- small pictures and words


def fan(count: int, inwards: bool) -> Markup:
    """The edges between one query and its sources or outputs."""
    lines = [(100 * (i + 0.5) / count, 50.0) for i in range(count)]
    ends = lines if inwards else [(b, a) for a, b in lines]
    drawn = "".join(f'<line x1="0" y1="{a:.1f}" x2="100" y2="{b:.1f}"/>' for a, b in ends)
    return Markup(
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg>'
    )


def groups(step: dict[str, Any]) -> Markup:
    """How even the key groups of a keyed step are."""
    found = step.get("by_group") or []
    most = max((group["rows"] for group in found), default=0)
    if not most:
        return Markup("")
    bars = "".join(
        f'<rect x="{i * 10 + 1}" width="8" y="{100 - 100 * g["rows"] / most:.1f}" '
        f'height="{100 * g["rows"] / most:.1f}"><title>key group {g["group"]}: '
        f"{words.rows(g['rows'])}, {words.size(g['bytes'])}</title></rect>"
        for i, g in enumerate(found)
    )
    says = f"rows in each of {len(found)} key groups, at most {words.rows(most)}"
    return Markup(
        f'<svg class="groups" viewBox="0 0 {10 * len(found)} 100" preserveAspectRatio="none" '
        f'role="img" aria-label="{says}">{bars}</svg>'
    )


def bar(part: float, kind: str) -> Markup:
    """How much of a whole."""
    width = 100 * min(1.0, max(0.0, part))
    return Markup(
        f'<svg class="{kind}" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="of" width="100" height="10"/><rect class="is" width="{width:.1f}" '
        'height="10"/></svg>'
    )


def budget_bar(campaign: dict[str, Any]) -> Markup:
    spent, budget = campaign.get("spend_micros"), campaign.get("budget_micros")
    if not isinstance(spent, int) or not isinstance(budget, int) or budget <= 0:
        return Markup(words.NOTHING)
    return bar(spent / budget, "budget") + Markup("<span>{}</span>").format(
        words.share(spent / budget)
    )


def place(path: Any) -> str:
    """The end of a long path says more than its beginning."""
    text = str(path)
    parts = text.split("/")
    return text if len(parts) <= 3 else "…/" + "/".join(parts[-2:])


def offset(value: Any) -> str:
    if value is None:
        return "the beginning"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def since(seconds: Any) -> str:
    """Since the beginning of a board."""
    found = seconds if isinstance(seconds, int | float) else None
    if found is None:
        return words.NOTHING
    return f"{found:.1f} s" if found < 120 else f"{int(found // 60)} min {int(found % 60)} s"
