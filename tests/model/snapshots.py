"""Snapshots of a running dataflow, on the explorer: two sources that feed one counter.

    a: a1 a2 ──channel──┐
                        ├──> count        what it has counted so far
    b: b1 b2 ──channel──┘

A source takes its part of the snapshot when it likes: it notes its offset and sends a marker
behind the records that it has sent. What the counter does with the two markers is the algorithm:

| algorithm | notes what it has counted | between the first marker and the second |
|---|---|---|
| chandy-lamport | at the first marker | counts on, and notes what the other channel brings |
| aligned | at the second marker | takes nothing from the channel that is ahead |
| at-least-once | at the second marker | counts on |

Then the job may crash. It is restored: sources go back to their offsets, the counter to what was
noted, and what was noted of the channels is in them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model.explorer import Broken

SOURCES = ("a", "b")
RECORDS = 2  # of each source
MARKER = "|"
ALGORITHMS = ("chandy-lamport", "aligned", "at-least-once")


class Flow(NamedTuple):
    """The world: where the job stands, and its snapshot as far as it was taken."""

    sent: tuple[int, ...] = (0, 0)  # the offset of each source
    channels: tuple[tuple[str, ...], ...] = ((), ())
    counted: tuple[str, ...] = ()  # sorted
    offsets: tuple[int | None, ...] = (None, None)  # in the snapshot
    markers: tuple[bool, ...] = (False, False)  # have they arrived?
    noted: tuple[str, ...] | None = None  # of the counter, in the snapshot
    in_flight: tuple[tuple[str, ...], ...] = ((), ())  # of the channels, in the snapshot
    crashes: int = 1  # that are left

    @property
    def complete(self) -> bool:
        return all(self.markers)


Rule = Callable[[Flow], Broken | None]


def consistent(flow: Flow) -> Broken | None:
    """The snapshot holds the records before its offsets: each once, and no other."""
    if not flow.complete:
        return None
    assert flow.noted is not None
    before = [
        f"{s}{n + 1}" for s, o in zip(SOURCES, flow.offsets, strict=True) for n in range(o or 0)
    ]
    holds = sorted([*flow.noted, *flow.in_flight[0], *flow.in_flight[1]])
    if holds == before:
        return None
    return Broken(
        "consistent", f"sent before the cut: {_list(before)}; the snapshot: {_list(holds)}"
    )


def counted_once(flow: Flow) -> Broken | None:
    twice = sorted({r for r in flow.counted if flow.counted.count(r) > 1})
    return Broken("counted once", f"counted twice: {_list(twice)}") if twice else None


def nothing_in_flight(flow: Flow) -> Broken | None:
    """For Chandy and Lamport's algorithm this is a rule to be broken, to see how."""
    found = [record for channel in flow.in_flight for record in channel]
    if flow.complete and found:
        return Broken("nothing in flight", f"the snapshot holds {_list(found)} in a channel")
    return None


@dataclass(frozen=True)
class Snapshots:
    """A dataflow under one algorithm, and the rules to hold it to."""

    algorithm: str
    rules: tuple[Rule, ...] = (consistent, counted_once)

    def begin(self) -> tuple[Flow, tuple[str, ...]]:
        return Flow(), (*SOURCES, "count", "crash")

    def quiet(self, process: str) -> bool:
        return False

    def steps(self, flow: Flow, process: str) -> Iterator[tuple[str, Flow, str]]:
        if process in SOURCES:
            moves = self._source(flow, SOURCES.index(process))
        elif process == "count":
            moves = self._count(flow)
        else:
            moves = self._crash(flow)
        for name, after in moves:
            yield f"{process}: {name}", after, process

    def _source(self, flow: Flow, n: int) -> Iterator[tuple[str, Flow]]:
        if flow.sent[n] < RECORDS:
            record = f"{SOURCES[n]}{flow.sent[n] + 1}"
            after = _send(flow, n, record)
            yield f"sends {record}", after._replace(sent=_put(flow.sent, n, flow.sent[n] + 1))
        if flow.offsets[n] is None:
            after = _send(flow, n, MARKER)
            after = after._replace(offsets=_put(flow.offsets, n, flow.sent[n]))
            yield f"notes offset {flow.sent[n]}, sends a marker", after

    def _count(self, flow: Flow) -> Iterator[tuple[str, Flow]]:
        for n, source in enumerate(SOURCES):
            blocked = self.algorithm == "aligned" and flow.markers[n] and not flow.complete
            if not flow.channels[n] or blocked:
                continue
            head, *rest = flow.channels[n]
            after = flow._replace(channels=_put(flow.channels, n, tuple(rest)))
            if head == MARKER:
                after, note = self._marker(after, n)
                yield f"takes the marker of {source}{note}", after
                continue
            after, note = after._replace(counted=tuple(sorted((*flow.counted, head)))), ""
            if (
                self.algorithm == "chandy-lamport"
                and flow.noted is not None
                and not flow.markers[n]
            ):
                note = ", notes it as in flight"
                after = after._replace(
                    in_flight=_put(flow.in_flight, n, (*flow.in_flight[n], head))
                )
            yield f"counts {head}{note}", after

    def _marker(self, flow: Flow, n: int) -> tuple[Flow, str]:
        flow = flow._replace(markers=_put(flow.markers, n, True))
        first = self.algorithm == "chandy-lamport"
        if flow.noted is None and (first or flow.complete):
            return flow._replace(
                noted=flow.counted
            ), f", notes that it counted {_list(flow.counted)}"
        return flow, ""

    def _crash(self, flow: Flow) -> Iterator[tuple[str, Flow]]:
        if flow.complete and flow.crashes:
            assert flow.noted is not None
            offsets = tuple(offset or 0 for offset in flow.offsets)
            yield (
                f"restored: offsets {offsets}, counted {_list(flow.noted)}",
                flow._replace(sent=offsets, channels=flow.in_flight, counted=flow.noted, crashes=0),
            )

    def judge(self, flow: Flow) -> Broken | None:
        return next((broken for rule in self.rules if (broken := rule(flow))), None)

    def judge_step(self, before: Flow, process: str, after: Flow) -> Broken | None:
        return None

    def judge_end(self, flow: Flow) -> Broken | None:
        """Nothing is lost: whatever is left to send and to take, all is counted in the end."""
        for process in ("count", *SOURCES):
            for _, after, _ in self.steps(flow, process):
                return self.judge_end(after)
        missing = {f"{s}{n + 1}" for s in SOURCES for n in range(RECORDS)} - set(flow.counted)
        return Broken("counted once", f"never counted: {_list(missing)}") if missing else None


def _put(values: tuple[Any, ...], n: int, value: Any) -> tuple[Any, ...]:
    return (*values[:n], value, *values[n + 1 :])


def _send(flow: Flow, n: int, what: str) -> Flow:
    return flow._replace(channels=_put(flow.channels, n, (*flow.channels[n], what)))


def _list(records: Any) -> str:
    return " ".join(sorted(records)) or "nothing"
