"""The shapes of what commands print with `--json` and the API answers, for parts that lie here."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

Json = dict[str, Any]


class KeyedStep(TypedDict):
    step: str
    rows: int
    late: int
    fired: int
    groups: int
    watermark_ms: int | None


class KeyedStepOfEpoch(KeyedStep):
    manifest: str


class DecisionFacts(TypedDict):
    term: int
    nonce: str
    at: str


class EpochInput(TypedDict):
    source: str
    start: Any
    end: Any
    files: int | None


class EpochOutput(TypedDict):
    output: str
    rows: int
    files: int
    bytes: int
    mode: str
    guarantee: str
    previous: Json | None


class OperatorState(TypedDict):
    operator: int
    kind: str | None
    partitions: int
    ids: Any


class Epoch(TypedDict):
    """`rerun`: only from `onceflow epoch show --rerun`."""

    job: str
    query: str
    lineage: str
    epoch: int
    decision: DecisionFacts
    input: list[EpochInput]
    rows_in: int | None
    rows_out: int
    outputs: list[EpochOutput]
    watermark_ms: int | None
    state: list[OperatorState]
    state_rows: int | None
    keyed: list[KeyedStepOfEpoch]
    ms: Json | None
    spark_ms: Json | None
    rerun: NotRequired[Json]


class StateStore(TypedDict):
    operator: int
    kind: str | None
    store: str
    partitions: int
    key: Any
    value: Any
    bytes: int


class State(TypedDict):
    """`retained`: the first and the last epoch that has it."""

    query: str
    lineage: str
    epoch: int | None
    decided: str | None
    retained: list[int] | None
    stores: list[StateStore]
    keyed: list[Json]
    error: NotRequired[str]


class LineageSavepoint(TypedDict):
    name: str
    at: str
    epochs: dict[str, int]


# By a call, because `from` is a keyword. `from`: query -> the epoch of its cut. `queries`: query ->
# its first and last epoch in this lineage.
LineageFacts = TypedDict(
    "LineageFacts",
    {
        "lineage": str,
        "parent": str | None,
        "from": dict[str, int],
        "reason": str,
        "at": str,
        "who": str | None,
        "code": str | None,
        "spark": str | None,
        "queries": dict[str, dict[str, int] | None],
        "ended": str | None,
    },
)


class Lineage(LineageFacts):
    current: bool
    savepoints: list[LineageSavepoint]


class SavepointSummary(TypedDict):
    name: str
    job: str
    at: str
    lineage: str
    epochs: dict[str, int]
    bytes: int
    files: int
    spark: str | None
    code: str | None
    onceflow: str
    who: str | None
    path: str


class RetainedEpoch(TypedDict):
    epoch: int
    at: str
    rows: int


class RetainedEpochs(TypedDict):
    query: str
    count: int
    first: RetainedEpoch | None
    last: RetainedEpoch | None
    epochs: NotRequired[list[RetainedEpoch]]


class Savepoints(TypedDict):
    """`savepoints`: each a SavepointSummary, or, if it cannot be read, its name and an error."""

    job: str
    savepoints: list[Json]
    retained: list[RetainedEpochs]
