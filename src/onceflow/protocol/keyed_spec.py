"""The declaration of keyed steps (`flow.keyed`): steps with state of their own, in a chain.

Each step is an action of its own over the rows that the step before it staged, so that its rows and
its state are of one attempt of each task. `keyed_runner.py` runs them; this module loads no Arrow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.quantities import milliseconds
from onceflow.contract.schema import columns, plain_schema
from onceflow.contract.sink import Sink
from onceflow.errors import JobError
from onceflow.spark.running_query import stateful_operations
from onceflow.store.names import check_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from onceflow.state.process import KeyedProcess

Change = Callable[["DataFrame"], "DataFrame"]
GROUPS = 128
NULL_KEYS = ("keep", "refuse")
# The columns with which `sources.Log` and `sources.Kafka` name the position of a row.
_TOPIC, _PARTITION, _OFFSET = "_topic", "_partition", "_offset"


@dataclass(frozen=True)
class EpochContext:
    """The number, the time and the staging folder of an epoch."""

    epoch: int
    now: int  # microseconds
    folder: Path

    @property
    def tag(self) -> str:
        """A part of the name of every file that the epoch writes."""
        return self.folder.name


@dataclass(frozen=True)
class KeyedStep:
    """One keyed step, as its author declared it."""

    name: str
    process: KeyedProcess
    by: tuple[str, ...]
    rows: str  # Spark's schema of the input rows
    output: str  # Spark's schema of the rows that the process emits
    event_time: str | None = None
    delay: int | None = None  # of the watermark, microseconds
    idle: int | None = None  # microseconds without rows after which a partition counts as idle
    order: tuple[str, ...] = ()  # columns: the partition of a row, and last its offset in it
    late: Sink | None = None
    null_keys: str = "keep"
    groups: int = GROUPS
    tasks: int | None = None
    initial: Path | None = None  # Parquet files with its state before the first epoch
    clocks: Mapping[str, str] = field(default_factory=dict)  # timer -> "event" or "processing"
    then: tuple[Change, ...] = ()

    @property
    def ticks(self) -> bool:
        """Does the step have work to do even if no rows come?"""
        return bool(self.clocks) or self.idle is not None

    @property
    def late_output(self) -> str:
        return f"{self.name}.late"


@dataclass(frozen=True)
class Keyed:
    """The result of `flow.keyed`: write it, change it with `then`, or key it again.

    It is not a DataFrame: its rows exist only inside an epoch, after the step has run.
    """

    df: DataFrame  # the stream that the first step reads
    steps: tuple[KeyedStep, ...]
    schema: str  # of the rows after the last step, as Spark's JSON

    def then(self, change: Change) -> Keyed:
        """Change the rows of each epoch with ordinary DataFrame code.

        onceflow calls `change` with a DataFrame (not a stream) of the epoch's rows; it returns
        another one. It must return the same rows whenever it is called with the same rows.
        """
        after = change(_empty(self.df.sparkSession, self.schema))
        if not hasattr(after, "schema") or getattr(after, "isStreaming", True):
            raise JobError(
                f"then({getattr(change, '__name__', change)}) returns "
                f"{type(after).__name__}, not a DataFrame of the epoch",
                hint="return a DataFrame that is derived from the argument",
            )
        last = replace(self.steps[-1], then=(*self.steps[-1].then, change))
        return replace(
            self, steps=(*self.steps[:-1], last), schema=plain_schema(after.schema.jsonValue())
        )

    @property
    def columns(self) -> list[str]:
        return list(columns(self.schema))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"the result of flow.keyed has no {name!r}: it is not a DataFrame. Change its rows "
            f"with .then(lambda df: df.{name}(…))"
        )


def keyed(
    df: DataFrame | Keyed,
    *,
    by: str | list[str] | tuple[str, ...],
    process: KeyedProcess,
    name: str | None = None,
    event_time: str | None = None,
    watermark: str | None = None,
    idle: str | None = None,
    order: tuple[str, ...] | None = None,
    late: Sink | None = None,
    null_keys: str = "keep",
    groups: int = GROUPS,
    tasks: int | None = None,
    initial: str | os.PathLike[str] | None = None,
) -> Keyed:
    """Add a keyed step; see `Flow.keyed`."""
    from onceflow.contract.schema import arrow_schema, spark_schema
    from onceflow.state.process import KeyedProcess
    from onceflow.state.step import Step

    before = df.steps if isinstance(df, Keyed) else ()
    rows = df.schema if isinstance(df, Keyed) else _stream_schema(df)
    if isinstance(process, type) and issubclass(process, KeyedProcess):
        process = process()
    if not isinstance(process, KeyedProcess):
        raise JobError(
            f"process={process!r} is not a KeyedProcess",
            hint="derive a class from onceflow.state.KeyedProcess, or use one of onceflow.state",
        )
    name = check_name("keyed step", name or type(process).__name__.lower())
    if any(step.name == name for step in before):
        raise JobError(f"two keyed steps are called {name!r}", hint="give one name=…")
    keys = (by,) if isinstance(by, str) else tuple(by)
    known = columns(rows)
    _refuse_columns(
        name, known, keys, event_time=event_time, watermark=watermark, order=order, late=late
    )
    if null_keys not in NULL_KEYS:
        raise JobError(
            f"null_keys={null_keys!r} of keyed step {name!r}", hint="use 'keep' or 'refuse'"
        )
    if not isinstance(groups, int) or not 1 <= groups <= 32768:
        raise JobError(f"groups={groups!r} of {name!r}", hint="use a number from 1 to 32768")
    if tasks is not None and (not isinstance(tasks, int) or not 1 <= tasks <= groups):
        raise JobError(f"tasks={tasks!r} of {name!r}", hint=f"use a number from 1 to {groups}")
    arrow = arrow_schema(rows)
    import pyarrow as pa

    from onceflow.state.keys import check_key

    for key in keys:
        check_key(key, known[key])
    bound = Step(
        process,
        keys=pa.schema([arrow.field(key) for key in keys]),
        rows=arrow,
        event_time=event_time,
        watermark=watermark is not None,
    )
    step = KeyedStep(
        name=name,
        process=process,
        by=keys,
        rows=rows,
        output=spark_schema(bound.output),
        event_time=event_time,
        delay=None if watermark is None else milliseconds(watermark) * 1000,
        idle=None if idle is None else milliseconds(idle) * 1000,
        order=_order(known) if order is None else tuple(order),
        late=late,
        null_keys=null_keys,
        groups=groups,
        tasks=tasks,
        initial=None if initial is None else Path(os.path.abspath(initial)),
        clocks=dict(bound.timers),
    )
    source = df.df if isinstance(df, Keyed) else df
    return Keyed(source, (*before, step), step.output)


def _stream_schema(df: Any) -> str:
    if not getattr(df, "isStreaming", False):
        raise JobError(
            "flow.keyed needs a streaming DataFrame, or the result of flow.keyed",
            hint="begin with flow.read(…)",
        )
    stateful = stateful_operations(df)
    if stateful:
        raise JobError(
            f"flow.keyed reads a DataFrame for which Spark keeps state ({', '.join(stateful)})",
            hint="write it to a log and read the log in another query, or use a keyed step for it",
        )
    return plain_schema(df.schema.jsonValue())


def _refuse_columns(
    name: str,
    known: dict[str, str],
    keys: tuple[str, ...],
    *,
    event_time: str | None,
    watermark: str | None,
    order: tuple[str, ...] | None,
    late: Sink | None,
) -> None:
    wanted = [*keys, *([event_time] if event_time else []), *(order or ())]
    missing = [column for column in wanted if column not in known]
    if missing or not keys:
        raise JobError(
            f"keyed step {name!r}: the rows have no column {', '.join(missing) or '(no by=)'}",
            hint=f"they have {', '.join(known)}",
        )
    if len(set(keys)) != len(keys):
        raise JobError(f"keyed step {name!r}: by= names a column twice", hint="name it once")
    if event_time is not None and known[event_time] not in ("timestamp", "timestamp_ntz"):
        raise JobError(
            f"keyed step {name!r}: event_time={event_time!r} is {known[event_time]}",
            hint="cast it to timestamp before",
        )
    if watermark is not None and event_time is None:
        raise JobError(
            f"keyed step {name!r} has a watermark and no event_time=",
            hint="name the column with the time of each row",
        )
    if late is not None and watermark is None:
        raise JobError(
            f"keyed step {name!r}: late= needs a watermark", hint='watermark="10 minutes"'
        )
    if late is not None and not isinstance(late, Sink):
        raise JobError(f"late={late!r} of {name!r} is not a sink", hint='late=Files("out/late")')


def _order(known: dict[str, str]) -> tuple[str, ...]:
    """The columns with the offsets of the source, if the rows still have them."""
    if _PARTITION not in known or _OFFSET not in known:
        return ()
    return (*([_TOPIC] if _TOPIC in known else []), _PARTITION, _OFFSET)


def _empty(spark: Any, schema: str) -> Any:
    from pyspark.sql.types import StructType

    return spark.createDataFrame([], StructType.fromJson(json.loads(schema)))
