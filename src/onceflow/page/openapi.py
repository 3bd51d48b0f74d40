"""The OpenAPI document of the HTTP API, at `/api/openapi.json`.

It is made of the operations of `api.py`: a path, the docstring of its handler, and the shape that
the handler returns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec

from onceflow.page.shapes import Error, NewSavepoint
from onceflow.page.sse import Stream
from onceflow.store.version import __version__

Schema = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """A path of the API. `handler` is a method of the API whose return type is the shape of the
    answer. `asks_targets`: it asks the targets of a job."""

    path: str
    handler: Any
    method: str = "get"
    query: dict[str, str] = field(default_factory=dict)  # parameter -> its description
    asks_targets: bool = False

    @property
    def returns(self) -> Any:
        return get_type_hints(self.handler, include_extras=True)["return"]

    @property
    def summary(self) -> str:
        return " ".join((self.handler.__doc__ or "").split())


_PARAMETERS = {
    "job": "a job of the home",
    "epoch": "a retained epoch",
    "board": "a board of the home",
    "run": "a run of onceflow verify",
}
_FAILURES = {
    "400": "a name, a number or the request itself is not valid",
    "404": "it does not exist",
    "414": "the address is too long",
    "421": "the page does not answer under that host",
    "431": "the head is too large",
    "500": "a file is damaged",
    "503": "a target is away or does not answer in time, or the page has too many requests",
}
_OF_TARGETS = {
    "403": "a browser asks for another site",
    "502": "a target is not what it should be",
}
_OF_ACTIONS = {
    "401": "no token, or a wrong one",
    "403": "the request is from another site, or the page is read-only",
    "408": "the body did not come in time",
    "409": "the name is taken, or another savepoint is being created",
    "413": "the body is too large",
    "429": "too many wrong tokens; Retry-After tells how many seconds to wait",
}
_SECURITY = {
    "token": {"type": "apiKey", "in": "header", "name": "X-Onceflow-Token"},
    "session": {"type": "apiKey", "in": "cookie", "name": "onceflow-PORT"},
    "csrf": {"type": "apiKey", "in": "header", "name": "X-Onceflow-CSRF"},
}


def document(operations: Iterable[Operation]) -> Schema:
    operations = list(operations)
    answers = [o.returns for o in operations if o.returns is not Stream]
    shapes, components = msgspec.json.schema_components(
        [Error, NewSavepoint, *answers], ref_template="#/components/schemas/{name}"
    )
    error, body, *rest = shapes
    schemas = iter(rest)
    paths: dict[str, Schema] = {}
    for operation in operations:
        streams = operation.returns is Stream
        kind = "text/event-stream" if streams else "application/json"
        schema = {"type": "string"} if streams else next(schemas)
        answer = {"description": operation.summary, "content": {kind: {"schema": schema}}}
        found: Schema = {
            "summary": operation.summary,
            "parameters": _parameters(operation),
            "responses": {"200": answer, **_failures(operation, error)},
        }
        if operation.method == "post":
            found["security"] = [{"token": []}, {"session": [], "csrf": []}]
            found["requestBody"] = {
                "required": False,
                "content": {"application/json": {"schema": body}},
            }
        paths.setdefault(operation.path, {})[operation.method] = found
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "onceflow",
            "version": __version__,
            "description": "The jobs of a home. Names of numbers end in their unit: _s, _ms, "
            "_bytes. /metrics, beside the API, is for Prometheus.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
    }


def _parameters(operation: Operation) -> list[Schema]:
    names = re.findall(r"{(\w+)}", operation.path)
    return [_parameter(name, "path", _PARAMETERS[name]) for name in names] + [
        _parameter(name, "query", says) for name, says in operation.query.items()
    ]


def _parameter(name: str, place: str, says: str) -> Schema:
    kind = "integer" if name == "epoch" else "string"
    return {
        "name": name, "in": place, "required": place == "path", "description": says,
        "schema": {"type": kind},
    }  # fmt: skip


def _failures(operation: Operation, error: Schema) -> Schema:
    more = _OF_ACTIONS if operation.method == "post" else {}
    more = _OF_TARGETS if operation.asks_targets else more
    return {
        code: {"description": why, "content": {"application/json": {"schema": error}}}
        for code, why in sorted({**_FAILURES, **more}.items())
    }
