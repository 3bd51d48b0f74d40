"""The declaration of a query."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onceflow.contract.ledger import Guarantee
from onceflow.contract.schema import plain_schema, selected
from onceflow.contract.sink import Sink
from onceflow.contract.source import Source
from onceflow.protocol.home import now
from onceflow.protocol.keyed_spec import KeyedStep
from onceflow.protocol.lease import host_name
from onceflow.store.version import __version__


@dataclass(frozen=True)
class QuerySpec:
    """A query as its author declared it."""

    df: Any
    outputs: Mapping[str, Sink]
    mode: str = "append"
    by: str | None = None
    on_bad: str | None = None  # the output of rows that their own output cannot store
    bad_only: bool = False  # that output gets no other rows: it has all columns of the rows
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of outputs with fewer
    keep_epochs: int = 100
    guarantees: Mapping[str, Guarantee] = field(
        default_factory=dict
    )  # of outputs with a weaker one
    sources: Mapping[str, Source] = field(default_factory=dict)  # of the job, if onceflow made them
    digests: bool = True  # take a digest of the rows of each epoch?
    inspect_only: bool = False  # tell no source about its positions
    code: str | None = None  # fingerprint of the author's code
    keyed: tuple[KeyedStep, ...] = ()  # steps between `df` and the outputs
    result: str | None = None  # the schema after these steps, as Spark's JSON

    @property
    def schema(self) -> str:
        """The schema of the rows that are written, as Spark's JSON."""
        return self.result or plain_schema(self.df.schema.jsonValue())

    @property
    def ticks(self) -> bool:
        """Do keyed steps have something to do when no rows come?"""
        return any(step.ticks for step in self.keyed)

    @property
    def late(self) -> dict[str, str]:
        """Outputs of late rows -> their schema."""
        return {step.late_output: step.rows for step in self.keyed if step.late is not None}

    def schema_of(self, output: str) -> str:
        if output in self.late:
            return self.late[output]
        names = self.columns.get(output)
        return self.schema if names is None else selected(self.schema, names)

    def mode_of(self, output: str) -> str:
        only_bad = self.bad_only and output == self.on_bad and self.mode != "complete"
        return "append" if output in self.late or only_bad else self.mode

    def guarantee(self, output: str) -> Guarantee:
        return self.guarantees.get(output, Guarantee.EXACTLY_ONCE)

    def facts(self, leader: Mapping[str, Any] | None) -> dict[str, Any]:
        """The facts that the fence of a start records. `leader`: the fence of the last start."""
        former = {**(leader or {}).get("former", {}), **(leader or {}).get("outputs", {})}
        return {
            "at": now(),
            "holder": {"pid": os.getpid(), "host": host_name()},
            "onceflow": __version__,
            "spark": self.df.sparkSession.version,
            "code": self.code,
            "mode": self.mode,
            # Outputs of earlier drivers: a restore must know where their rows are.
            "former": {name: of for name, of in former.items() if name not in self.outputs},
            "outputs": {
                name: {"guarantee": self.guarantee(name), **sink.describe()}
                for name, sink in self.outputs.items()
            },
            # All sources of the job; the decisions name those that this query reads.
            "sources": {name: source.origin() for name, source in self.sources.items()},
        }
