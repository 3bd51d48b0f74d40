"""The state of some key groups at the end of an epoch: look-ups, due timers, and scans.

A look-up costs what its keys cost, not what the state does: it searches the runs, newest first, for
the keys that were not found yet, and reads only their rows. Memory is bounded by the keys, and for
a scan by one block of each run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from onceflow.state.keys import END, Places, find_repeats, first_place, group_of, groups_of
from onceflow.state.manifest import Entry, Manifest, Run
from onceflow.state.runs import OpenRun, StoreSchema, close_removed, find_bounds, open_run
from onceflow.state.vectors import Bools, Ints


@dataclass(frozen=True)
class Piece:
    """Rows in the order of their places, each key once."""

    places: Places
    keys: pa.Table
    values: pa.Table
    live: Bools

    def filter(self, keep: Bools) -> Piece:
        if keep.all():
            return self
        mask = pa.array(keep)
        keys, values = self.keys.filter(mask), self.values.filter(mask)
        return Piece(self.places[keep], keys, values, self.live[keep])


class Reader:
    """Reads the state of `groups` as `manifest` describes it."""

    def __init__(
        self, folder: Path, manifest: Manifest, schema: StoreSchema, groups: range | None = None
    ) -> None:
        self.folder, self.manifest, self.schema = folder, manifest, schema
        self.groups = range(manifest.groups) if groups is None else groups
        self._served = [
            (entry, mask) for entry in manifest.entries if (mask := self._mask(entry)).any()
        ]
        self._open: dict[str, OpenRun] = {}
        close_removed()

    def _mask(self, entry: Entry) -> Bools:
        mask = np.zeros(self.manifest.groups, np.bool_)
        for part in entry.serves:
            mask[max(part.start, self.groups.start) : min(part.stop, self.groups.stop)] = True
        return mask

    def _open_number(self, number: int) -> OpenRun:
        return self.open(self._served[number][0].run)

    def open(self, run: Run) -> OpenRun:
        """The run, verified. It stays open as long as the reader."""
        if run.name not in self._open:
            self._open[run.name] = open_run(self.folder, run, self.schema)
        return self._open[run.name]

    # ------------------------------------------------------------ some keys

    def look_up(self, places: Places, keys: pa.Table) -> tuple[pa.Table, Bools]:
        """The values of each key, null where there are none, and which keys have state.

        `ValueError` unless the places are in order and in the groups of the reader.
        """
        rows, pieces, total = np.full(len(places), -1), [], 0
        found = np.zeros(len(places), np.bool_)
        for number, who, table in self._resolve(places, keys, values=True):
            run = self._open_number(number)
            found[who] = run.live(table)
            rows[who] = np.arange(total, total + len(who))
            pieces.append(run.values(table))
            total += len(who)
        if not pieces:
            nulls = [pa.nulls(len(places), field.type) for field in self.schema.values]
            return pa.Table.from_arrays(nulls, schema=self.schema.values), found
        values = pa.concat_tables(pieces).combine_chunks()
        if total < len(places) or (rows[1:] < rows[:-1]).any():
            values = values.take(pa.array(rows, mask=rows < 0))
        return values, found

    def _resolve(
        self, places: Places, keys: pa.Table, *, values: bool
    ) -> Iterator[tuple[int, Ints, pa.Table]]:
        """Which run has the newest version of which keys, with the rows; also tombstones."""
        if not len(places):
            return
        if (places[1:] < places[:-1]).any():
            raise ValueError("places are not in order")
        groups = groups_of(places, self.manifest.groups)
        if groups[0] not in self.groups or groups[-1] not in self.groups:
            raise ValueError(f"places of groups {groups[0]} to {groups[-1]} in {self.groups}")
        is_open = np.ones(len(places), np.bool_)
        for number, (_, mask) in enumerate(self._served):
            mine = np.flatnonzero(is_open & mask[groups])
            if not mine.size:
                continue
            run = self._open_number(number)
            everything = len(mine) == len(places)
            asked = keys if everything else keys.take(mine)
            for who, table in run.find(
                places if everything else places[mine], asked, values=values
            ):
                is_open[mine[who]] = False
                yield number, mine[who], table

    # ------------------------------------------------------------ timers

    def find_due(
        self,
        timer: str,
        until: int,
        low: int,
        high: int,
        most: int,
        *,
        handled: tuple[int, int] | None = None,
    ) -> tuple[Places, pa.Table, int]:
        """About `most` keys at places in [low, high) whose timer is at or before `until`.

        Also the place up to which these are all. `handled`: an epoch, and the time up to which it
        fired every timer. Timers that old in runs from before that epoch were replaced, and are
        skipped.
        """
        found, reach = [], high
        for age, (entry, mask) in enumerate(self._served):
            since = None if handled is None or entry.run.born >= handled[0] else handled[1]
            if _has_none_due(entry.run, timer, until):
                continue
            run, count = self.open(entry.run), 0
            for number in run.overlapping(low, high):
                at = self._due_rows(run, number, timer, (since, until), mask)
                start, stop = find_bounds(run.places(number), low, high)
                at = at[(at >= start) & (at < stop)]
                if at.size:
                    found.append((age, number, at))
                    count += at.size
                if count > most and run.is_complete(number):
                    reach = min(reach, int(run.lasts[number]) + 1)
                    break
        places, keys, owners, reach = self._gather(found, reach, most)
        if not len(places):
            return places, keys, reach
        newest = np.zeros(len(places), np.bool_)
        for age, who, _ in self._resolve(places, keys, values=False):
            newest[who] = owners[who] == age
        return places[newest], keys.filter(pa.array(newest)), reach

    def _due_rows(
        self,
        run: OpenRun,
        number: int,
        timer: str,
        between: tuple[int | None, int],
        mask: Bools,
    ) -> Ints:
        since, until = between
        earliest = run.earliest(number, timer)
        column = None if earliest is None or earliest > until else run.times(number, timer)
        if column is None:
            return np.zeros(0, np.int64)
        due = pc.less_equal(column, until)
        if since is not None:
            due = pc.and_(due, pc.greater(column, since))
        at = np.flatnonzero(pc.fill_null(due, False).to_numpy(zero_copy_only=False))
        served: Ints = at[mask[groups_of(run.places(number)[at], self.manifest.groups)]]
        return served

    def _gather(
        self, found: Sequence[tuple[int, int, Ints]], reach: int, most: int
    ) -> tuple[Places, pa.Table, Ints, int]:
        """Candidates in the order of places, up to where all are known, and the run of each."""
        places = [self._open_number(age).places(number)[at] for age, number, at in found]
        everything = np.sort(np.concatenate(places)) if places else np.zeros(0, np.int64)
        if len(everything) > most:
            # All keys of a place are taken, and at least one place.
            reach = min(reach, max(int(everything[most]), int(everything[0]) + 1))
        keys, kept, owners = [self.schema.keys.empty_table()], [], []
        for (age, number, at), there in zip(found, places, strict=True):
            stop = find_bounds(there, -END, reach)[1]
            if stop:
                kept.append(there[:stop])
                owners.append(np.full(stop, age))
                run = self._open_number(age)
                rows = run.block(number).take(pa.array(at[:stop]))
                keys.append(run.keys(pa.Table.from_batches([rows])))
        if not kept:
            return np.zeros(0, np.int64), keys[0], np.zeros(0, np.int64), reach
        order = np.argsort(all_places := np.concatenate(kept), kind="stable")
        table = pa.concat_tables(keys).combine_chunks().take(pa.array(order))
        return all_places[order], table, np.concatenate(owners)[order], reach

    def find_next_due(self, timer: str, after: int | None = None) -> int | None:
        """A time after `after` before which no timer is due; None if no timer is set.

        The version of the row that has this time may have been replaced.
        """
        times = []
        for entry, mask in self._served:
            if entry.run.timers.get(timer, -END) is None:
                continue
            run = self.open(entry.run)
            for number in range(len(run)):
                first, last = (group_of(int(p[number]), len(mask)) for p in (run.firsts, run.lasts))
                if not mask[first : last + 1].any():
                    continue
                time = run.earliest(number, timer)
                if time is not None and (time == -END or (after is not None and time <= after)):
                    column = run.times(number, timer)
                    if column is not None and after is not None:
                        column = column.filter(pc.greater(column, after))
                    time = None if column is None else pc.min(column).as_py()
                if time is not None:
                    times.append(time)
        return min(times, default=None)

    # ------------------------------------------------------------ everything

    def scan(
        self, low: int | None = None, high: int | None = None
    ) -> Iterator[tuple[Places, pa.Table, pa.Table]]:
        """Places, keys and values of all live keys at places in [low, high), in order."""
        groups = self.manifest.groups
        start = first_place(self.groups.start, groups) if low is None else low
        stop = first_place(self.groups.stop, groups) if high is None else high
        for part, runs in self._group_ranges():
            one, two = first_place(part.start, groups), first_place(part.stop, groups)
            opened = [self.open(run) for run in runs]
            for piece in merge_runs(opened, max(one, start), min(two, stop)):
                live = piece.filter(piece.live)
                if len(live.places):
                    yield live.places, live.keys, live.values

    def _group_ranges(self) -> Iterator[tuple[range, list[Run]]]:
        """The groups in ranges that the same runs serve."""
        start, before = self.groups.start, None
        for group in (*self.groups, None):
            serving = None if group is None else [e.run for e, mask in self._served if mask[group]]
            if before is not None and serving != before:
                stop = self.groups.stop if group is None else group
                yield range(start, stop), before
                start = stop
            before = serving


def _has_none_due(run: Run, timer: str, until: int) -> bool:
    earliest = run.timers.get(timer, -END)  # it was no timer when the run was written
    return earliest is None or earliest > until


def merge_runs(runs: Sequence[OpenRun], low: int, high: int) -> Iterator[Piece]:
    """The newest version of all keys at places in [low, high), also tombstones.

    The runs are newest first. At most one block of each is held at a time.
    """
    while low < high:
        nexts = [run.overlapping(low, high) for run in runs]
        ends = [int(run.lasts[n.start]) + 1 for run, n in zip(runs, nexts, strict=True) if n]
        if not ends:
            return
        end = min(high, *ends)
        parts = [(run, batches) for run in runs if (batches := run.between(low, end))]
        if parts:
            yield _keep_newest([(run, pa.Table.from_batches(batches)) for run, batches in parts])
        low = end


def _keep_newest(parts: Sequence[tuple[OpenRun, pa.Table]]) -> Piece:
    places = np.concatenate([rows.column(0).to_numpy() for _, rows in parts])
    keys = pa.concat_tables([run.keys(rows) for run, rows in parts])
    live = np.concatenate([run.live(rows) for run, rows in parts])
    values = pa.concat_tables([run.values(rows) for run, rows in parts])
    if len(parts) == 1:
        return Piece(places, keys, values, live)
    # Rows of one place keep the order of age, so the newest of a key comes first.
    order = np.argsort(places, kind="stable")
    places, keys = places[order], keys.combine_chunks().take(pa.array(order))
    older = find_repeats(places, keys)
    if older is not None:
        newest = ~older
        places, keys, order = places[newest], keys.filter(pa.array(newest)), order[newest]
    return Piece(places, keys, values.combine_chunks().take(pa.array(order)), live[order])
