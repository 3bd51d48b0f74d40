"""Writes docs/snapshots-explained.md: its traces and numbers are what the explorer found."""

from __future__ import annotations

from model.explorer import explore
from model.snapshots import (
    Rule,
    Snapshots,
    consistent,
    counted_once,
    nothing_in_flight,
)

_PAGE = """\
# Snapshots, explained

A streaming job never stands still, and a snapshot of it must be as if it had. This page shows
what that means on three processes, with two algorithms that do it and one that does it almost.
Nothing here was made up by hand: every trace is a shortest one that
[the explorer](model.md) found, every "always" was looked at in every state that the example can
reach. A test holds this page to the code (`tests/model/snapshots.py`).

## The example

```
a: a1 a2 ──channel──┐
                    ├──> count
b: b1 b2 ──channel──┘
```

Two sources send two records each, in order, through channels that keep the order. A counter takes
from either channel and remembers what it has counted. Think of two Kafka partitions and a
stateful operator. Everybody works at their own pace; a record that was sent and not yet counted is
*in flight*.

## What a consistent cut is

A snapshot notes an offset for each source, what the counter has counted and, perhaps, records in
flight. Nobody can note all of it at the same moment, and nobody has to. It must be a
**consistent cut**: it holds every record that was sent before the noted offsets, once, and no
other. A record that is in the counter but behind the offset is counted again after a restore. A
record before the offset that is in neither the counter nor a channel is lost.

All algorithms here begin in the same way. Each source, when it likes, notes its offset and sends a
**marker** behind what it has sent (Flink calls it a barrier). They differ in what the counter does
between the first marker and the second.

## Chandy and Lamport: note the channels too

The counter notes what it has counted at the **first** marker. It goes on counting; what comes from
the other channel before that channel's marker was in flight when the cut was made, so it is noted
as well.

```
{in_flight}
```

`a1` was sent before `a` noted its offset and counted after the counter had noted its state. So it
is in neither; it is in the channel, and the snapshot says so. In all {chandy_lamport} states the
cut is consistent, and a job that is restored from it counts every record once: the noted records
are put back into the channel. The algorithm asks for nothing but channels in order, works on any
graph, also on one with cycles, and nobody ever waits. The price is that records are stored with
the snapshot. Flink's *unaligned* checkpoints are this.

## Aligned barriers: wait instead

This is the asynchronous barrier snapshot, Flink's ordinary checkpoint. The counter takes nothing
more from a channel whose marker has arrived, until the other marker is there too. Then it notes
what it has counted. All records before both markers are counted, none behind them is: in all
{aligned} states the cut is consistent **and nothing is in flight in it**. A snapshot is offsets and
state, as small as it can be. The price is the waiting: the channel that is ahead stands still while
the slower one catches up.

## The same without waiting

If the counter goes on with the channel that is ahead and notes its state at the second marker, the
snapshot holds a record that it should not. One crash later it is counted twice:

```
{twice}
```

Nothing is ever lost in this way: it is what Flink calls at-least-once. It is also the shortest
answer to the question why exactly-once has a price.

## And in onceflow?

Spark runs a query in epochs. An epoch takes a fixed range of offsets, all of it goes through every
operator, and only then the next range begins. So the end of an epoch is a moment at which
**everybody has got the marker and nobody has gone on**: each source stands at the end of its
range, the state has taken in all of it, and no record is between two operators. The snapshot of an
epoch is therefore offsets, state version and what every output has published, and there is no
channel to note. It is the aligned cut, and the waiting is what Spark does between two epochs in
any case.

onceflow needs one thing more, as its snapshot reaches into the targets: the cut must not change
when a crash comes in the middle of publishing. That is what the decision in the epoch log is for.
Offsets, state and rows of one attempt are named in one entry, so the cut is made by one atomic
step, and what is not published yet is published from it.

Where jobs are joined by a log or a topic, there are channels again: rows that one job has
published and the next has not read. They need not be noted, because the log already keeps them.
The channel state of Chandy and Lamport's snapshot is the part of the log between the two offsets.
"""


def page() -> str:
    return _PAGE.format(
        in_flight=_trace("chandy-lamport", nothing_in_flight),
        twice=_trace("at-least-once", counted_once),
        chandy_lamport=_states("chandy-lamport", consistent, counted_once),
        aligned=_states("aligned", consistent, counted_once, nothing_in_flight),
    )


def _trace(algorithm: str, rule: Rule) -> str:
    """A shortest trace to where the rule breaks."""
    violation = explore(Snapshots(algorithm, (rule,))).violation
    assert violation is not None
    steps = [f"{number}. {step}" for number, step in enumerate(violation.trace, 1)]
    return "\n".join([*steps, f"   {violation.what}"])


def _states(algorithm: str, *rules: Rule) -> str:
    """How many states there are, none of which breaks a rule."""
    explored = explore(Snapshots(algorithm, rules))
    assert explored.violation is None
    return f"{explored.states:,}"
