"""The shapes of the API's answers: the single source of its OpenAPI document.

mypy checks the code that builds an answer against its shape, `openapi.py` turns the shapes into
JSON Schema, and a test compares real answers with that. Answers that commands print with `--json`
have the shapes of `snapshots/shapes.py` and `service/ledger_view.py`.

Names end in their unit: `_s`, `_ms`, `_bytes`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from onceflow.snapshots.published_rows import OutputPlan
from onceflow.snapshots.shapes import Json, KeyedStep

# Written by an application or by `onceflow verify`, and passed on as it is.
FreeForm = Annotated[Json, Meta(description="as the application wrote it")]

JobState = Literal["running", "stopped", "damaged", "starting", "restarting"]
MarkKind = Literal["start", "killed", "restart", "error", "stop", "savepoint"]
RunState = Literal["running", "ended", "broken"]


class Error(TypedDict):
    """What is wrong, as a command with `--json` writes it."""

    event: str
    kind: str
    message: str
    hint: Annotated[str, Meta(description="the command or edit that fixes it")]
    exit_code: Annotated[int, Meta(description="of a command")]
    retryable: bool


# ---------------------------------------------------------------- jobs


class Leader(TypedDict):
    pid: int
    host: str
    since: str


class JobFacts(TypedDict):
    job: str
    state: JobState
    says: Annotated[str, Meta(description="the state in words")]
    guarantee: Annotated[str | None, Meta(description="the weakest of its outputs")]
    guarantee_says: Annotated[str, Meta(description="what that guarantee means")]
    lag_s: float | None
    rows_in_per_s: float
    rows_out_per_s: float
    epoch: Annotated[
        int | None, Meta(description="the last published epoch; the largest of its queries")
    ]
    published_at: str | None
    published_s_ago: float | None
    term: Annotated[int, Meta(description="of the driver that led last")]
    leader: Leader | None
    restarts: Annotated[int, Meta(description="in its journal")]
    error: str | None
    sparkline: Annotated[list[float], Meta(description="rows out a second, in steps of 2 seconds")]


class JobSummary(JobFacts):
    queries: list[str]


class SourceFacts(TypedDict):
    source: str
    kind: str | None
    place: str | None
    end: Any
    rows_per_s: float | None


class OutputFacts(TypedDict):
    output: str
    kind: str | None
    target: str | None
    place: Annotated[str | None, Meta(description="as a source names it that reads it")]
    guarantee: str | None
    rows_per_s: float
    rows: Annotated[int, Meta(description="in the last epoch")]
    rows_total: Annotated[float | None, Meta(description="since its driver started")]


class Percentiles(TypedDict):
    """Milliseconds."""

    p50: float | None
    p90: float | None
    p99: float | None
    epochs: Annotated[int, Meta(description="that the percentiles are of")]


class EpochSteps(TypedDict):
    epoch: int
    at: Annotated[str, Meta(description="when it began")]
    ms: Annotated[dict[str, float], Meta(description="by step")]
    rows_in: float | None
    rows_out: int
    term: int


class Query(TypedDict):
    query: str
    epoch: Annotated[int | None, Meta(description="decided last")]
    decided: str | None
    rows: Annotated[int, Meta(description="in that epoch")]
    rows_in_per_s: float
    rows_out_per_s: float
    lag_s: float | None
    watermark: str | None
    late_rows: Annotated[
        float, Meta(description="since its driver started, or in the retained epochs")
    ]
    rejected_rows: Annotated[float | None, Meta(description="since its driver started")]
    state_rows: float | None
    state_bytes: int | None
    sources: list[SourceFacts]
    outputs: list[OutputFacts]
    percentiles: Percentiles
    steps: list[EpochSteps]
    keyed: list[KeyedStep]


class Mark(TypedDict):
    """Something that happened to a job."""

    at: str
    kind: MarkKind
    says: str
    savepoint: NotRequired[str]


class Link(TypedDict):
    """Another job that reads what this one writes, or writes what this one reads."""

    job: str
    kind: str
    place: str
    says: str
    reads: Annotated[bool, Meta(description="true if the other job reads what this one writes")]


class Job(JobFacts):
    lineage: str | None
    queries: list[Query]
    marks: list[Mark]
    links: list[Link]


# ---------------------------------------------------------------- plans, savepoints


class Plan(TypedDict):
    """As `onceflow restore --plan --json`. `command`: to run once the job is stopped."""

    job: str
    lineage: None
    at_once: bool
    outputs: list[OutputPlan]
    command: str


class NewSavepoint(TypedDict, total=False):
    name: Annotated[str | None, Meta(description="the current time if it is left out")]


# ---------------------------------------------------------------- boards, runs of verify


class BoardSummary(TypedDict):
    board: str
    title: str
    at: str | None


class Board(TypedDict):
    board: str
    title: NotRequired[Any]
    says: NotRequired[Any]
    unit: NotRequired[Any]
    at: NotRequired[Any]
    samples: list[FreeForm]
    marks: list[FreeForm]
    last: FreeForm | None


class RunSummary(TypedDict):
    run: str
    state: RunState
    says: str
    began: str | None
    seconds: float | None
    verdict: str | None
    seed: int | None
    command: str | None
    struck: Annotated[int | None, Meta(description="faults")]
    violations: int | None
    progress: FreeForm | None
    report: Annotated[bool, Meta(description="it has a report, at /verify/{run}/report")]
    events_bytes: int


class Run(RunSummary):
    events: list[FreeForm]
    result: FreeForm | None
