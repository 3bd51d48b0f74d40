"""The HTTP API: its answers, its refusals, and that its document describes both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import reading
from alive import Alive
from asking import ask
from starlette.applications import Starlette
from starlette.routing import Route

from onceflow.errors import Damaged, TargetAway
from onceflow.page import home_reader
from onceflow.page.api import OPERATIONS, Api
from onceflow.page.app import create
from onceflow.page.errors import status_of
from onceflow.page.home_reader import HomeReader
from onceflow.page.openapi import document
from onceflow.snapshots.savepoints import Savepoints

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shop = Alive(tmp_path)
    shop.start()
    shop.run(3)
    shop.tell()
    Savepoints(shop.folder).create("monday", {})
    (tmp_path / "_boards").mkdir()
    (tmp_path / "_boards" / "ads.jsonl").write_text(
        '{"board": "ads", "title": "Ads"}\n{"t": 1, "totals": {"n": 1}}\n'
    )
    run = tmp_path / "_verify" / "run-1"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text('{"event": "begin", "at": "2026-01-01T00:00:00Z"}\n')
    return tmp_path


@pytest.fixture
def app(home: Path) -> Starlette:
    return Starlette(routes=Api(HomeReader(home)).routes())


def test_answers_are_those_of_the_reader(home: Path, app: Starlette) -> None:
    for path, made in {
        "/api/jobs/shop/epochs/1": reading.epoch(home, "shop", 1),
        "/api/jobs/shop/state": reading.state(home, "shop"),
        "/api/jobs/shop/ledgers": reading.ledgers(home, "shop"),
        "/api/jobs/shop/lineages": reading.lineages(home, "shop"),
        "/api/jobs/shop/savepoints": reading.savepoints(home, "shop"),
        "/api/boards": reading.boards(home),
        "/api/boards/ads": reading.board(home, "ads"),
        "/api/verify": reading.verify_runs(home),
        "/api/verify/run-1": reading.verify_run(home, "run-1"),
    }.items():
        answer = ask(app, path)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json"), path
        assert answer.json == made, path
    assert ask(app, "/api/jobs").json[0]["epoch"] == 2
    assert ask(app, "/api/jobs/shop").json["queries"][0]["query"] == "out"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/jobs/nobody", 404),
        ("/api/jobs/nobody/ledgers", 404),
        ("/api/jobs/shop/epochs/99", 404),
        ("/api/jobs/shop/epochs/-1", 400),
        ("/api/jobs/shop/epochs/1e3", 400),
        ("/api/jobs/shop/epochs/" + "9" * 400, 400),
        ("/api/jobs/_boards", 400),
        ("/api/jobs/..", 400),
        ("/api/jobs/a%00b", 400),
        ("/api/jobs/%ff", 400),
        ("/api/jobs/" + "x" * 5000, 400),
        ("/api/boards/..", 400),
        ("/api/boards/none", 404),
        ("/api/verify/.hidden", 400),
        ("/api/verify/none", 404),
        ("/api/events?job=..%2f..%2fetc", 400),
        ("/api/events?job=nobody", 404),
    ],
)
def test_unknown_and_invalid_names_are_refused_as_by_a_command(
    app: Starlette, path: str, status: int
) -> None:
    answer = ask(app, path)
    assert answer.status == status
    assert set(answer.json) == {"event", "kind", "message", "hint", "exit_code", "retryable"}
    assert answer.json["hint"]


@pytest.mark.parametrize("path", ["/api/jobs/../../etc/passwd", "/api/jobs/%2e%2e%2fetc", "/api"])
def test_a_path_out_of_the_home_is_not_found(app: Starlette, path: str) -> None:
    assert ask(app, path).status == 404


def test_an_unexpected_failure_is_shown_without_a_stack_trace(
    app: Starlette, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(home_reader, "lineages", broken)
    answer = ask(app, "/api/jobs/shop/lineages")
    assert answer.status == 500
    assert answer.json["kind"] == "OnceflowError"
    assert b"secret" not in answer.body
    assert b"Traceback" not in answer.body


def test_the_status_fits_the_error() -> None:
    assert status_of(Damaged("x")) == 500
    assert status_of(TargetAway("x")) == 503


def test_changes_are_streamed(app: Starlette) -> None:
    answer = ask(app, "/api/events?job=shop", until=b"event: job")
    assert answer.headers["content-type"].startswith("text/event-stream")
    line = next(ln for ln in answer.body.splitlines() if ln.startswith(b"data: {"))
    assert json.loads(line.removeprefix(b"data: "))["job"] == "shop"
    answer = ask(app, "/api/events", until=b"event: jobs")
    line = next(ln for ln in answer.body.splitlines() if ln.startswith(b"data: ["))
    assert json.loads(line.removeprefix(b"data: "))[0]["job"] == "shop"


# ---------------------------------------------------------------- the document


def test_the_document_lists_every_route_and_no_other(home: Path) -> None:
    made = {
        (route.path, method.lower())
        for route in create(home, token=None).routes
        if isinstance(route, Route) and route.path.startswith("/api")
        for method in route.methods or ()
        if method != "HEAD"
    }
    described = {
        (path, method)
        for path, methods in document(OPERATIONS)["paths"].items()
        for method in methods
    }
    assert described == made


def test_every_parameter_of_a_path_is_described() -> None:
    for path, methods in document(OPERATIONS)["paths"].items():
        for method in methods.values():
            named = [p["name"] for p in method["parameters"] if p["in"] == "path"]
            assert [part[1:-1] for part in path.split("/") if part.startswith("{")] == named


def test_every_shape_of_the_document_is_used() -> None:
    text = json.dumps(document(OPERATIONS))
    for name in document(OPERATIONS)["components"]["schemas"]:
        assert f'"#/components/schemas/{name}"' in text


def test_answers_have_the_shapes_of_the_document(app: Starlette) -> None:
    paths = {
        "/api/jobs": "/api/jobs",
        "/api/jobs/{job}": "/api/jobs/shop",
        "/api/jobs/{job}/epochs/{epoch}": "/api/jobs/shop/epochs/1",
        "/api/jobs/{job}/state": "/api/jobs/shop/state",
        "/api/jobs/{job}/ledgers": "/api/jobs/shop/ledgers",
        "/api/jobs/{job}/lineages": "/api/jobs/shop/lineages",
        "/api/jobs/{job}/savepoints": "/api/jobs/shop/savepoints",
        "/api/boards": "/api/boards",
        "/api/boards/{board}": "/api/boards/ads",
        "/api/verify": "/api/verify",
        "/api/verify/{run}": "/api/verify/run-1",
        "/api/openapi.json": "/api/openapi.json",
    }
    told = document(OPERATIONS)
    for path, target in paths.items():
        content = told["paths"][path]["get"]["responses"]["200"]["content"]
        check_fits(ask(app, target).json, content["application/json"]["schema"], target)
    check_fits(ask(app, "/api/jobs/nobody").json, told["components"]["schemas"]["Error"], "error")
    kept = ask(app, "/api/jobs/shop/savepoints").json["savepoints"]
    assert [one["name"] for one in kept] == ["monday"]
    check_fits(kept[0], told["components"]["schemas"]["SavepointSummary"], "savepoint")


TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
    "object": dict, "null": type(None),
}  # fmt: skip


def check_fits(value: Any, schema: dict[str, Any], where: str) -> None:
    """As far as our document uses JSON Schema. An object has the listed fields, and no others."""
    if "$ref" in schema:
        schema = document(OPERATIONS)["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if (kind == {"type": "null"}) == (value is None)]
        assert kinds, f"{where}: {value!r}"
        check_fits(value, kinds[0], where)
    if "type" in schema:
        kinds = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        assert any(isinstance(value, TYPES[kind]) for kind in kinds), f"{where}: {value!r}"
    if "enum" in schema:
        assert value in schema["enum"], where
    if isinstance(value, list) and "items" in schema:
        for i, item in enumerate(value):
            check_fits(item, schema["items"], f"{where}[{i}]")
    if isinstance(value, dict):
        for name in schema.get("required", ()):
            assert name in value, f"{where} has no {name}"
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                check_fits(value[name], inner, f"{where}.{name}")
        if "properties" in schema:
            assert set(value) <= set(schema["properties"]), f"{where} has what is not described"
        for name, inner in value.items():
            if isinstance(schema.get("additionalProperties"), dict):
                check_fits(inner, schema["additionalProperties"], f"{where}.{name}")
