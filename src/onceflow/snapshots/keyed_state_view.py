"""The state of a keyed step at the end of any retained epoch, whether the job runs or not.

Manifests and runs never change, so a reader sees the state of that epoch whatever the job does
meanwhile. If the job removes the files of the epoch, the error says so.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from onceflow.contract.schema import arrow_schema, type_name
from onceflow.errors import Damaged, JobError
from onceflow.log.row_output import plain_rows, show_time
from onceflow.log.strict_values import Malformed, from_json, from_text, load_json
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import JobFolder, Query
from onceflow.protocol.keyed_runner import FOLDER, manifest_of
from onceflow.snapshots.epochs import not_retained
from onceflow.state.files import ABOUT, HIDDEN, Tell, dump
from onceflow.state.keys import group_of, groups_of, places_of
from onceflow.state.manifest import Manifest
from onceflow.state.runs import StoreSchema
from onceflow.state.store import Reader
from onceflow.store.posix import make_dirs, replace_file, translate_disk_full

Row = dict[str, Any]


@dataclass(frozen=True)
class KeyLookup:
    """The result of a look-up: the key, its group, and its row if there is one."""

    key: Row
    group: int
    row: Row | None


@dataclass(frozen=True)
class KeyedState:
    """The state of one keyed step at the end of one epoch."""

    query: Query
    decision: Decision
    epochs: list[int]  # the retained ones
    step: str

    @property
    def record(self) -> Mapping[str, Any]:
        """What the decision of the epoch says about the step."""
        return self.decision.keyed[self.step]

    @property
    def folder(self) -> Path:
        return self.query.folder / FOLDER / self.step

    @property
    def timers(self) -> tuple[str, ...]:
        return tuple(self.record["next"])

    @cached_property
    def schema(self) -> StoreSchema:
        keys, values = (arrow_schema(self.record["schema"][part]) for part in ("keys", "values"))
        return StoreSchema(keys, values, self.timers)

    @cached_property
    def kinds(self) -> dict[str, Any]:
        """Column -> its type in Spark's JSON, keys first."""
        parts = [json.loads(self.record["schema"][part]) for part in ("keys", "values")]
        return {field["name"]: field["type"] for part in parts for field in part["fields"]}

    @cached_property
    def manifest(self) -> Manifest:
        with self._explain_missing():
            return manifest_of(self.query.folder, self.decision, self.step)

    @contextlib.contextmanager
    def _explain_missing(self) -> Iterator[None]:
        """A missing file is damage, unless the job no longer retains the epoch."""
        try:
            yield
        except (Damaged, FileNotFoundError):
            known = self.query.epoch_log().read().decisions
            if self.decision.nonce in {decision.nonce for decision in known}:
                raise
            others = [decision.epoch for decision in known]
            raise not_retained(self.query, self.decision.epoch, others) from None

    # ------------------------------------------------------------ how much there is

    def about(self) -> Row:
        """Sizes and columns, without reading a row. Rows include their older versions."""
        manifest = self.manifest
        counts, sizes = manifest.counts(), self._sizes()
        rows = sum(counts)
        return {
            "step": self.step,
            "key": self._columns(self.schema.keys.names),
            "states": self._columns(self._states),
            "timers": list(self.timers),
            "watermark": self.record["watermark"],
            "groups": manifest.groups,
            "rows": rows,
            "bytes": manifest.bytes(),
            "runs": len(manifest.entries),
            "largest_to_mean": max(counts) * len(counts) / rows if rows else None,
            "by_group": [
                {
                    "group": group, "rows": count, "bytes": size,
                    "share": count / rows if rows else 0.0,
                }
                for group, (count, size) in enumerate(zip(counts, sizes, strict=True))
            ],
        }  # fmt: skip

    def _sizes(self) -> list[int]:
        """Bytes of each group, as if all rows of a run were equally large."""
        found = [0.0] * self.manifest.groups
        for entry in self.manifest.entries:
            for part in entry.serves:
                for group in part:
                    found[group] += entry.run.bytes * entry.run.count(group) / entry.run.rows
        return [round(size) for size in found]

    @property
    def _states(self) -> list[str]:
        names = self.schema.values.names
        return [n for n in names if not n.startswith(HIDDEN) and n not in self.timers]

    def _columns(self, names: list[str]) -> list[dict[str, str]]:
        return [{"name": name, "type": type_name(self.kinds[name])} for name in names]

    # ------------------------------------------------------------ rows

    def rows(self) -> Iterator[Row]:
        """All keys, in the order of their places."""
        with self._explain_missing():
            for places, keys, values in self._reader().scan():
                yield from self._to_rows(groups_of(places, self.manifest.groups), keys, values)

    def look_up(self, text: str) -> KeyLookup:
        """Look up one key: the text of its only column, or several as a JSON list or object."""
        given = _key(text, {name: self.kinds[name] for name in self.schema.keys.names})
        columns = [
            pa.array([value], field.type)
            for value, field in zip(given, self.schema.keys, strict=True)
        ]
        keys = pa.Table.from_arrays(columns, schema=self.schema.keys)
        place = places_of(keys)
        group = group_of(int(place[0]), self.manifest.groups)
        with self._explain_missing():
            values, found = self._reader(range(group, group + 1)).look_up(place, keys)
        row = next(self._to_rows(np.array([group]), keys, values))
        return KeyLookup(row["key"], group, row if found[0] else None)

    def _reader(self, groups: range | None = None) -> Reader:
        return Reader(self.folder, self.manifest, self.schema, groups)

    def _to_rows(self, groups: Any, keys: pa.Table, values: pa.Table) -> Iterator[Row]:
        columns = [*keys.columns, *values.columns]
        table = pa.Table.from_arrays(columns, names=[*keys.column_names, *values.column_names])
        (batch,) = table.combine_chunks().to_batches()
        for group, row in zip(groups.tolist(), plain_rows(batch, self.kinds), strict=True):
            written = {n.removeprefix(HIDDEN): row[n] for n in row if n.startswith(HIDDEN)}
            yield {
                "group": group,
                "key": {name: row[name] for name in keys.column_names},
                "state": {name: row[name] for name in self._states},
                "timers": {name: row[name] for name in self.timers},
                "written": {n: None if at is None else show_time(at) for n, at in written.items()},
            }

    # ------------------------------------------------------------ as Parquet

    def export(self, to: Path, tell: Tell) -> int:
        """Write all rows as Parquet and return their number. An export that fails leaves nothing.
        One that is killed leaves files that say they are not complete."""
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise JobError(f"{to} exists and is not empty", hint="name a new or empty folder")
        about = {
            "job": self.query.job, "query": self.query.name, "step": self.step,
            "lineage": self.query.lineage, "epoch": self.decision.epoch,
            "schema": self.record["schema"],
        }  # fmt: skip
        try:
            with self._explain_missing(), translate_disk_full(to):
                make_dirs(to)
                replace_file(to / ABOUT, _document({**about, "rows": None, "complete": False}))
                rows = dump(self._reader(), to, tell)
                replace_file(to / ABOUT, _document({**about, "rows": rows, "complete": True}))
        except BaseException:
            for path in to.iterdir() if to.is_dir() else ():
                path.unlink()
            raise
        return rows


def _document(body: Row) -> bytes:
    return (json.dumps(body, indent=2, ensure_ascii=False) + "\n").encode()


def _key(text: str, kinds: Mapping[str, Any]) -> list[Any]:
    """The columns of a key, as Arrow takes them."""
    try:
        named = load_json(text)
    except Malformed:
        named = None
    if isinstance(named, list) and len(named) == len(kinds):
        named = dict(zip(kinds, named, strict=True))
    try:
        if isinstance(named, dict) and named.keys() == kinds.keys():
            return [
                None if (value := named[name]) is None else from_json(kind)(value)
                for name, kind in kinds.items()
            ]
        if len(kinds) == 1:
            ((_, kind),) = kinds.items()
            return [None if text == "null" and kind != "string" else from_text(kind)(text)]
    except Malformed as error:
        raise JobError(f"--key {text}: {error}", hint=_as_key(kinds)) from None
    raise JobError(f"--key {text} is not a key of this state", hint=_as_key(kinds))


def _as_key(kinds: Mapping[str, Any]) -> str:
    columns = ", ".join(f"{name} {type_name(kind)}" for name, kind in kinds.items())
    form = json.dumps(dict.fromkeys(kinds, "…"), ensure_ascii=False)
    plain = "its text, or " if len(kinds) == 1 else ""
    return f"the key is {columns}; write {plain}{form}, or the values as a list in that order"


def choose_step(
    folder: JobFolder, steps: list[KeyedState], step: str | None, *, one: bool = False
) -> list[KeyedState]:
    """The chosen steps, or the chosen one. `JobError` that lists all if that is not possible."""
    found = [state for state in steps if step in (None, state.step)]
    if found and not (one and len(found) > 1):
        return found
    named = "" if step is None else f" {step!r}"
    there = ", ".join(f"--query {state.query.name} --step {state.step}" for state in found or steps)
    raise JobError(
        f"job {folder.name} has {'more than one' if found else 'no'} keyed step{named}",
        hint=f"there are: {there}"
        if there
        else f"onceflow state list {folder.name} shows its state",
    )
