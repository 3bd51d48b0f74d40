"""The flow: the object on which a job function declares its sources and outputs."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.contract.abilities import offered_guarantees, refuse_unused_methods
from onceflow.contract.ledger import Guarantee
from onceflow.contract.sink import Sink
from onceflow.contract.source import Source
from onceflow.errors import JobError
from onceflow.protocol.home import JobFolder
from onceflow.protocol.keyed_spec import GROUPS, Keyed, keyed
from onceflow.protocol.query_spec import QuerySpec
from onceflow.store.names import check_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from onceflow.state.process import KeyedProcess

MODES = ("append", "update", "complete")


class Flow:
    """Collects what a job declares. Nothing runs before the job function has returned."""

    def __init__(self, spark: SparkSession, folder: JobFolder | None = None) -> None:
        self.spark = spark
        self._folder = folder
        self.queries: dict[str, QuerySpec] = {}
        self.sources: dict[str, Source] = {}
        self._names: set[str] = set()
        self._fork = None if folder is None else folder.fork()

    def read(self, name: str, source: Source | DataFrame) -> DataFrame:
        """A plain streaming DataFrame over `source`. The checkpoint identifies sources by name.

        `source` may be a streaming DataFrame of your own (`spark.readStream.name(…)…`). A query
        that uses a source twice (a self-join) reads it twice, under two names.
        """
        if not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise JobError(
                f"{name!r} is not a name for a source", hint="use letters, digits and '_'"
            )
        if name in self._names:
            raise JobError(f"two sources are called {name!r}", hint="rename one")
        self._names.add(name)
        if not isinstance(source, Source):
            return _streaming(source, f"source {name!r}")
        if self._folder is not None:
            # "latest" is the end of the input at the first start of the job, not at a later start
            pin = self._folder.pin(name, source.pin)
            if pin is not None:
                source = source.pinned(pin, partial(self._folder.keep, name))
        self.sources[name] = source
        if isinstance(source.on_bad, Sink):
            self.write(f"{name}.rejected", source.rejected(self.spark, name), to=source.on_bad)
        return source.stream(self.spark, name)

    def keyed(
        self,
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
        """Send the rows of `df` by key through a process that keeps state for each key.

        The result can be written, changed by DataFrame code (`.then(lambda df: …)`) and given to
        another `flow.keyed`. `name` is the name of the state for its life, by default that of the
        process. `watermark`: how far behind the latest `event_time` of its partition a row may
        arrive; later ones go to `late`, or are only counted. `order`: the columns with the
        partition of a row and, last, its offset there; those of `Log` and `Kafka` are found.
        `idle`: a partition that has been silent for this long no longer holds the watermark back.
        `null_keys`: "keep" (null is a key) or "refuse". `groups`: key groups, for the life of the
        state. `tasks`: in how many tasks it runs; may change at any start. `initial`: a folder of
        Parquet files with a row for each key: the state before the first epoch of the step.
        """
        return keyed(
            df, by=by, process=process, name=name, event_time=event_time, watermark=watermark,
            idle=idle, order=order, late=late, null_keys=null_keys, groups=groups, tasks=tasks,
            initial=initial,
        )  # fmt: skip

    def write(
        self,
        name: str,
        df: DataFrame | Keyed,
        *,
        to: Sink | Mapping[str, Sink],
        mode: str = "append",
        by: str | None = None,
        columns: Mapping[str, Sequence[str]] | None = None,
        on_bad: str | Sink | None = None,
        guarantee: str | Mapping[str, str] = Guarantee.EXACTLY_ONCE,
    ) -> None:
        """Publish the rows of `df` to a sink, or to several that are decided together.

        Several: `to={"valid": …, "rejected": …}, by="outcome"`, where the column `by` names the
        output of each row. `columns={"rejected": ["line", "reason"]}` says which columns an output
        has, if not all of them; in rows of other outputs these may be null.

        `on_bad` is a sink for rows that their own output can never take (a null key for a table,
        too large a message for a topic), or the name of one of several outputs; without it such
        rows stop the job. The sink becomes an output of its own, called `<name>.rejected`, with all
        columns of the rows. `mode` is Spark's output mode. `guarantee`:
        "exactly-once", or by choice "at-least-once" or "at-most-once"; {output: guarantee} for
        several.
        """
        check_name("output", name)
        if name in self.queries:
            raise JobError(f"two outputs are called {name!r}", hint="rename one")
        declared = declare(
            name, df, to, mode=mode, by=by, columns=columns, on_bad=on_bad, guarantee=guarantee
        )
        if self._fork is not None:
            declared = replace(declared, outputs=self._moved(name, declared.outputs))
        taken = {t: o for o, other in self.queries.items() for t in targets(other)}
        for target in targets(declared):
            if target in taken:
                raise JobError(
                    f"outputs {taken[target]!r} and {name!r} write to the same target",
                    hint="give every output a target of its own",
                )
        self._refuse_loop(declared)
        self.queries[name] = declared

    def _moved(self, query: str, outputs: Mapping[str, Sink]) -> dict[str, Sink]:
        """The outputs of a fork, which never writes where its parent does."""
        assert self._fork is not None
        places = self._fork["outputs"]
        for output in outputs:
            if f"{query}/{output}" not in places:
                raise JobError(
                    f"output {query}/{output} did not exist when the job was forked, so the "
                    "fork has no target for it",
                    hint="fork again under another name, from a savepoint that has this output",
                )
        return {output: sink.moved(places[f"{query}/{output}"]) for output, sink in outputs.items()}

    def _refuse_loop(self, declared: QuerySpec) -> None:
        """Refuse an output inside a folder that the job reads: it would become its own input."""
        for source_name, source in self.sources.items():
            folder = getattr(source, "path", None)
            for _, path, _ in targets(declared):
                if folder and path and Path(path).is_relative_to(folder):
                    raise JobError(
                        f"{path} lies in {folder}, which source {source_name!r} reads",
                        hint="write to a folder that is not read",
                    )


def declare(
    name: str,
    df: DataFrame | Keyed,
    to: Sink | Mapping[str, Sink],
    *,
    mode: str,
    by: str | None,
    columns: Mapping[str, Sequence[str]] | None,
    on_bad: str | Sink | None,
    guarantee: str | Mapping[str, str],
) -> QuerySpec:
    steps = df.steps if isinstance(df, Keyed) else ()
    if not steps:
        _streaming(df, f"output {name!r}")
    if mode not in MODES:
        raise JobError(f"{mode!r} is not an output mode", hint=f"use one of {', '.join(MODES)}")
    outputs = {name: to} if isinstance(to, Sink) else dict(to) if isinstance(to, Mapping) else {}
    wrong = [repr(sink) for sink in outputs.values() if not isinstance(sink, Sink)]
    if not outputs or wrong:
        raise JobError(
            f"output {name!r} goes to {', '.join(wrong) or repr(to)}, which is not a sink",
            hint='to=Files("out"), or to={"valid": …, "rejected": …} with by="outcome"',
        )
    for output in outputs:
        check_name("output", output)
    bad_only = isinstance(on_bad, Sink)
    if isinstance(on_bad, Sink):
        on_bad = _add_output(name, outputs, f"{name}.rejected", on_bad)
    elif on_bad is not None and (len(outputs) < 2 or on_bad not in outputs):
        raise JobError(
            f"on_bad={on_bad!r} of output {name!r} is neither a sink nor one of several outputs",
            hint='on_bad=Files("rejected")',
        )
    chosen = _columns(name, outputs, columns or {}, None if bad_only else on_bad)
    guarantees = _guarantees(outputs, guarantee)
    for step in steps:
        if step.late is not None:
            _add_output(name, outputs, step.late_output, step.late)
    declared = QuerySpec(
        df=df.df if isinstance(df, Keyed) else df,
        outputs=outputs,
        mode=mode,
        by=by,
        on_bad=on_bad,
        bad_only=bad_only,
        columns=chosen,
        guarantees=guarantees,
        keyed=steps,
        result=df.schema if isinstance(df, Keyed) else None,
    )
    for sink in outputs.values():
        refuse_unused_methods(sink)
    found = targets(declared)
    if len(found) != len(set(found)):
        raise JobError(f"two outputs of {name!r} write to the same target", hint="rename one")
    return declared


def _add_output(query: str, outputs: dict[str, Sink], name: str, sink: Sink) -> str:
    if name in outputs:
        raise JobError(f"two outputs of {query!r} are called {name!r}", hint="rename one")
    outputs[name] = sink
    return name


def _columns(
    name: str,
    outputs: Mapping[str, Sink],
    asked: Mapping[str, Sequence[str]],
    on_bad: str | None,
) -> dict[str, tuple[str, ...]]:
    strange = sorted(set(asked) - set(outputs))
    if strange:
        raise JobError(
            f"columns= of {name!r} names output {strange[0]!r}, which does not exist",
            hint=f"outputs are {', '.join(outputs)}",
        )
    if asked and on_bad is not None:
        raise JobError(
            f"{name!r} has columns= and on_bad={on_bad!r}: a row that goes from one output to "
            "another has the columns of the first",
            hint='give bad rows a sink of their own: on_bad=Files("rejected")',
        )
    texts = [output for output, names in asked.items() if isinstance(names, str)]
    if texts:
        raise JobError(
            f"columns= of output {texts[0]!r} is a string", hint='write columns={"a": ["id", "at"]}'
        )
    return {output: tuple(names) for output, names in asked.items()}


def _guarantees(
    outputs: Mapping[str, Sink], asked: str | Mapping[str, str]
) -> dict[str, Guarantee]:
    wanted = dict(asked) if isinstance(asked, Mapping) else dict.fromkeys(outputs, asked)
    known = [str(guarantee) for guarantee in Guarantee]
    for output, guarantee in wanted.items():
        if output not in outputs or guarantee not in known:
            raise JobError(
                f"guarantee={guarantee!r} for output {output!r}: there is no such output"
                if output not in outputs
                else f"{guarantee!r} is not a guarantee",
                hint=f"outputs are {', '.join(outputs)}; use one of {', '.join(known)}",
            )
        offered = ", ".join(offered_guarantees(outputs[output]))
        if guarantee not in offered_guarantees(outputs[output]):
            raise JobError(
                f"{outputs[output]} cannot promise {guarantee}",
                hint=f"it offers {offered}; choose that, or another sink",
            )
    return {output: Guarantee(guarantee) for output, guarantee in wanted.items()}


def targets(declared: QuerySpec) -> list[tuple[str, ...]]:
    """The identity of each target: the kind of its sink, its path, and the rest of its address."""
    found: list[tuple[str, ...]] = []
    for sink in declared.outputs.values():
        target = sink.describe()
        parts = [name for name in (sink.place, "dsn", "schema", "table") if name in target]
        where = {name: target[name] for name in parts} if parts or "path" in target else target
        # Several outputs may write to a shared target, each by a sink of its own.
        whose = str(id(sink)) if sink.shared else json.dumps(where, sort_keys=True)
        found.append((str(target["kind"]), str(target.get("path", "")), whose))
    return found


def _streaming(df: Any, what: str) -> DataFrame:
    if not getattr(df, "isStreaming", False):
        raise JobError(
            f"{what} is not a streaming DataFrame",
            hint="start from flow.read(…) or spark.readStream.name(…)",
        )
    return df  # type: ignore[no-any-return]
