"""The OpenAPI document of the HTTP API, at `/api/openapi.json`. A test holds it and the routes
together, in both directions, and its shapes and the answers."""

from __future__ import annotations

from typing import Any

from onceflow.store.version import __version__

Schema = dict[str, Any]


def _type(name: str, says: str = "", *, null: bool = False) -> Schema:
    found: Schema = {"type": [name, "null"] if null else name}
    return {**found, "description": says} if says else found


def _text(says: str = "", *, null: bool = False) -> Schema:
    return _type("string", says, null=null)


def _whole(says: str = "", *, null: bool = False) -> Schema:
    return _type("integer", says, null=null)


def _number(says: str = "", *, null: bool = False) -> Schema:
    return _type("number", says, null=null)


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _object(fields: dict[str, Schema], *, null: bool = False) -> Schema:
    kind: Any = ["object", "null"] if null else "object"
    return {"type": kind, "properties": fields, "required": list(fields)}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_ANY: Schema = {}
_MAP: Schema = {"type": "object"}

_SUMMARY: dict[str, Schema] = {
    "job": _text(),
    "state": {
        "type": "string", "enum": ["running", "stopped", "damaged", "starting", "restarting"],
    },
    "says": _text("the state in words"),
    "guarantee": _text("the weakest of its outputs", null=True),
    "guarantee_says": _text("what that means"),
    "lag_s": _number("seconds", null=True),
    "rows_in_per_s": _number(),
    "rows_out_per_s": _number(),
    "epoch": _whole("published last, the largest of its queries", null=True),
    "published_at": _text("when", null=True),
    "published_s_ago": _number("seconds", null=True),
    "term": _whole("of the driver that led last"),
    "leader": _object({"pid": _whole(), "host": _text(), "since": _text()}, null=True),
    "restarts": _whole("in its journal"),
    "error": _text(null=True),
    "queries": _list(_text()),
    "sparkline": _list(_number("rows out a second, in two seconds")),
}  # fmt: skip

_SOURCE = _object({
    "source": _text(), "kind": _text(null=True), "place": _text(null=True), "end": _ANY,
    "rows_per_s": _number(null=True),
})  # fmt: skip
_OUTPUT = _object({
    "output": _text(), "kind": _text(null=True), "target": _text(null=True),
    "guarantee": _text(null=True), "rows_per_s": _number(), "rows": _whole("in the last epoch"),
    "rows_total": _whole("since its driver started", null=True),
})  # fmt: skip
_PERCENTILES = _object({
    "p50": _number("milliseconds", null=True), "p90": _number("milliseconds", null=True),
    "p99": _number("milliseconds", null=True), "epochs": _whole("that they are of"),
})  # fmt: skip
_STEPS = _object({
    "epoch": _whole(), "at": _text("when it began"), "ms": _MAP, "rows_in": _whole(null=True),
    "rows_out": _whole(), "term": _whole(),
})  # fmt: skip
_KEYED = _object({
    "step": _text(), "rows": _whole(), "late": _whole(), "fired": _whole(), "groups": _whole(),
    "watermark_ms": _whole(null=True),
})  # fmt: skip
_QUERY: dict[str, Schema] = {
    "query": _text(),
    "epoch": _whole("decided last", null=True),
    "decided": _text("when", null=True),
    "rows": _whole("in that epoch"),
    "rows_in_per_s": _number(),
    "rows_out_per_s": _number(),
    "lag_s": _number("seconds", null=True),
    "watermark": _text(null=True),
    "late_rows": _whole("since its driver started, or in the retained epochs"),
    "rejected_rows": _whole("since its driver started", null=True),
    "state_rows": _whole(null=True),
    "state_bytes": _whole(null=True),
    "sources": _list(_SOURCE),
    "outputs": _list(_OUTPUT),
    "percentiles": _PERCENTILES,
    "steps": _list(_STEPS),
    "keyed": _list(_KEYED),
}
_MARK = _object({
    "at": _text(), "says": _text(),
    "kind": {
        "type": "string", "enum": ["start", "killed", "restart", "error", "stop", "savepoint"],
    },
})  # fmt: skip
_LINK = _object({
    "job": _text(), "kind": _text(), "place": _text(), "says": _text(),
    "reads": _type("boolean", "it reads what this job writes; else it writes what this one reads"),
})  # fmt: skip

_SCHEMAS: dict[str, Schema] = {
    "Error": _object({
        "event": _text(), "kind": _text(), "message": _text(), "hint": _text("what mends it"),
        "exit_code": _whole("of a command"), "retryable": _type("boolean"),
    }),
    "JobSummary": _object(_SUMMARY),
    "Job": _object({
        **_SUMMARY, "lineage": _text(null=True), "queries": _list(_object(_QUERY)),
        "marks": _list(_MARK), "links": _list(_LINK),
    }),
    "Epoch": _object({
        "job": _text(), "query": _text(), "lineage": _text(), "epoch": _whole(),
        "decision": _object({"term": _whole(), "nonce": _text(), "at": _text()}),
        "input": _list(_MAP), "rows_in": _whole(null=True), "rows_out": _whole(),
        "outputs": _list(_MAP), "watermark_ms": _whole(null=True), "state": _list(_MAP),
        "state_rows": _whole(null=True), "keyed": _list(_MAP), "ms": _ANY, "spark_ms": _ANY,
    }),
    "State": _object({
        "query": _text(), "lineage": _text(), "epoch": _whole(null=True),
        "decided": _text(null=True), "retained": _ANY, "stores": _list(_MAP), "keyed": _list(_MAP),
    }),
    "Ledger": _object({
        "query": _text(), "output": _text(null=True), "decided": _whole(null=True),
        "published": _whole(null=True), "term": _whole(null=True), "lineage": _text(null=True),
        "guarantee": _text(null=True), "target": _text(null=True),
        "says": _text("what comes of it, or why the target was not heard"),
    }),
    "Lineage": _object({
        "lineage": _text(), "parent": _text(null=True), "from": _MAP, "reason": _text(),
        "at": _text(), "who": _text(null=True), "code": _text(null=True), "spark": _text(null=True),
        "queries": _MAP, "ended": _text(null=True), "current": _type("boolean"),
        "savepoints": _list(_MAP),
    }),
    "Savepoint": _object({
        "name": _text(), "job": _text(), "at": _text(), "lineage": _text(), "epochs": _MAP,
        "bytes": _whole(), "files": _whole(), "spark": _text(null=True), "code": _text(null=True),
        "onceflow": _text(), "who": _text(null=True), "path": _text(),
    }),
    "Savepoints": _object({
        "job": _text(), "savepoints": _list(_MAP), "retained": _list(_MAP),
    }),
    "Plan": _object({
        "job": _text(), "lineage": _text(null=True), "at_once": _type("boolean"),
        "outputs": _list(_object({
            "query": _text(), "output": _text(), "target": _text(), "cut": _whole(),
            "published": _whole(null=True), "choice": _text(), "says": _text(),
        })),
        "command": _text("what to run, on a stopped job"),
    }),
    "BoardSummary": _object({"board": _text(), "title": _text(), "at": _text(null=True)}),
    "Board": _object({
        "board": _text(), "samples": _list(_MAP), "marks": _list(_MAP), "last": _ANY,
    }),
    "Run": _object({
        "run": _text(), "state": {"type": "string", "enum": ["running", "ended", "broken"]},
        "says": _text(), "began": _text(null=True), "seconds": _number(null=True),
        "verdict": _text(null=True), "seed": _whole(null=True), "command": _text(null=True),
        "struck": _whole(null=True), "violations": _whole(null=True), "progress": _ANY,
        "report": _type("boolean"),
    }),
}  # fmt: skip
_SCHEMAS["RunDetails"] = {
    "allOf": [_ref("Run"), _object({"events": _list(_MAP), "result": _ANY})],
}


def _parameter(name: str, says: str, *, where: str = "path", of: Schema | None = None) -> Schema:
    return {
        "name": name, "in": where, "required": where == "path", "description": says,
        "schema": of or _text(),
    }  # fmt: skip


_PATH = {
    "job": _parameter("job", "a job of the home"),
    "epoch": _parameter("epoch", "a retained epoch", of=_whole()),
    "board": _parameter("board", "a board of the home"),
    "run": _parameter("run", "a run of onceflow verify"),
}
_FAILURES = {
    "400": "a name or a number is none",
    "404": "it is not there",
    "414": "the address is too long",
    "421": "the page does not answer under that host",
    "431": "the head is too large",
    "500": "a file is damaged",
    "503": "a target is away or does not answer in time, or the page answers too many requests",
}
_OF_TARGETS = {
    "403": "a browser asks for another site",
    "502": "a target is not what it should be",
}
_OF_ACTIONS = {
    "401": "no token, or a wrong one",
    "403": "from another site, or the page only reads",
    "408": "the body did not come in time",
    "409": "there is one of that name, or one is being taken",
    "413": "the body is too large",
    "429": "too many wrong tokens; Retry-After says for how many seconds nobody is heard",
}
_ASKS_TARGETS = ("/api/jobs/{job}/ledgers", "/api/jobs/{job}/plan")


def _get(
    path: str, says: str, answer: Schema, *,
    kind: str = "application/json", query: tuple[Schema, ...] = (),
) -> Schema:  # fmt: skip
    named = [parameter for name, parameter in _PATH.items() if f"{{{name}}}" in path]
    return {
        "summary": says,
        "parameters": [*named, *query],
        "responses": {
            "200": {"description": says, "content": {kind: {"schema": answer}}},
            **_failures(_OF_TARGETS if path in _ASKS_TARGETS else {}),
        },
    }


def _failures(more: dict[str, str]) -> Schema:
    return {code: _failure(why) for code, why in sorted({**_FAILURES, **more}.items())}


def _failure(why: str) -> Schema:
    return {"description": why, "content": {"application/json": {"schema": _ref("Error")}}}


_READS: dict[str, tuple[str, Schema]] = {
    "/api/jobs": ("All jobs of the home", _list(_ref("JobSummary"))),
    "/api/jobs/{job}": ("One job", _ref("Job")),
    "/api/jobs/{job}/epochs/{epoch}": (
        "One epoch, of each query that has it: as onceflow epoch show", _list(_ref("Epoch")),
    ),
    "/api/jobs/{job}/state": ("Its state: as onceflow state list", _list(_ref("State"))),
    "/api/jobs/{job}/ledgers": (
        "What each target itself says is published: as onceflow ledger", _list(_ref("Ledger")),
    ),
    "/api/jobs/{job}/lineages": ("Its lineages: as onceflow lineages", _list(_ref("Lineage"))),
    "/api/jobs/{job}/savepoints": (
        "Savepoints and retained epochs: as onceflow savepoint list", _ref("Savepoints"),
    ),
    "/api/boards": ("What applications show", _list(_ref("BoardSummary"))),
    "/api/boards/{board}": ("One board", _ref("Board")),
    "/api/verify": ("Runs of onceflow verify, the newest first", _list(_ref("Run"))),
    "/api/verify/{run}": ("One run", _ref("RunDetails")),
    "/api/openapi.json": ("This document", _MAP),
}  # fmt: skip


def document() -> Schema:
    paths: dict[str, Schema] = {
        path: {"get": _get(path, says, answer)} for path, (says, answer) in _READS.items()
    }
    paths["/api/events"] = {"get": _get(
        "/api/events",
        "All jobs, or one, again when something changes: events `jobs` or `job`, whose data is "
        "the answer of /api/jobs or /api/jobs/{job}. In between, `beat` says that it is still so, "
        "and `stale` that it cannot be read, and why",
        _text(),
        kind="text/event-stream",
        query=(_parameter("job", "only this one", where="query"),),
    )}  # fmt: skip
    paths["/api/jobs/{job}/plan"] = {"get": _get(
        "/api/jobs/{job}/plan",
        "What a restore or a rollback would do, and the command: as onceflow restore --plan",
        _ref("Plan"),
        query=(
            _parameter("restore", "a savepoint of the job", where="query"),
            _parameter("rollback", "a retained epoch, or a time", where="query"),
            _parameter("published", "rewind, skip or replay", where="query"),
        ),
    )}  # fmt: skip
    paths["/api/jobs/{job}/savepoints"]["post"] = {
        "summary": "Make a savepoint: as onceflow savepoint create",
        "parameters": [_PATH["job"]],
        "requestBody": {
            "required": False,
            "content": {"application/json": {"schema": {
                "type": "object", "properties": {"name": _text("else the time", null=True)},
            }}},
        },
        "security": [{"token": []}, {"session": [], "csrf": []}],
        "responses": {
            "200": {
                "description": "the savepoint",
                "content": {"application/json": {"schema": _ref("Savepoint")}},
            },
            **_failures(_OF_ACTIONS),
        },
    }  # fmt: skip
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "onceflow", "version": __version__,
            "description": "What the jobs of a home do. Numbers are in the units that their names "
            "end in: _s, _ms, _bytes. /metrics, beside it, is in Prometheus' text format.",
        },
        "paths": paths,
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {
                "token": {"type": "apiKey", "in": "header", "name": "X-Onceflow-Token"},
                "session": {"type": "apiKey", "in": "cookie", "name": "onceflow-PORT"},
                "csrf": {"type": "apiKey", "in": "header", "name": "X-Onceflow-CSRF"},
            },
        },
    }  # fmt: skip
