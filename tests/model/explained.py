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

A streaming job never stops, but a snapshot of it must show one moment of it. This page shows what
that means for three processes, with two algorithms that are right and one that is almost right.
[The explorer](model.md) found every trace here, and no shorter trace shows the same. It checked
every claim in all states that the example can reach. A test compares this page with the code
(`tests/model/snapshots.py`).

## The example

```
a: a1 a2 ──channel──┐
                    ├──> count
b: b1 b2 ──channel──┘
```

Two sources send two records each, in order, through channels that keep the order. A counter takes
from either channel and remembers what it has counted. Think of two Kafka partitions and a
stateful operator. Each process works at its own speed. A record that was sent and is not yet
counted is *in flight*.

## What a consistent cut is

A snapshot notes an offset for each source, what the counter has counted and, perhaps, records in
flight. No process can note all of it at the same moment, and none has to. The snapshot must be a
**consistent cut**: it holds every record that was sent before the noted offsets, once, and no
other. A record that is in the counter but behind the offset is counted again after a restore. A
record before the offset that is in neither the counter nor a channel is lost.

All algorithms here begin in the same way. At any time, each source notes its offset and sends a
**marker** behind the records that it has sent (Flink calls it a barrier). The algorithms differ in
what the counter does between the first marker and the second.

## Chandy and Lamport: note the channels too

The counter notes what it has counted at the **first** marker, and continues to count. Records that
come from the other channel before that channel's marker were in flight when the cut was made, so
the counter notes them as well.

```
{in_flight}
```

`a1` was sent before `a` noted its offset and counted after the counter had noted its state. So it
is in neither; it is in the channel, and the snapshot says so. In all {chandy_lamport} states the
cut is consistent, and a job that is restored from it counts every record once: the noted records
are put back into the channel. The algorithm needs only channels that keep the order. It works on
any graph, even one with cycles, and no process ever waits. The price is that records are stored
with the snapshot. Flink's *unaligned* checkpoints work in this way.

## Aligned barriers: wait instead

This is the asynchronous barrier snapshot, Flink's ordinary checkpoint. When a marker has arrived,
the counter takes nothing more from its channel until the other marker has arrived too. Then it
notes what it has counted: all records before both markers, and none behind them. In all
{aligned} states the cut is consistent **and nothing is in flight in it**. A snapshot is offsets and
state, as small as it can be. The price is the wait: the channel that is ahead stops while the
slower one catches up.

## The same without waiting

If the counter continues with the channel that is ahead and notes its state at the second marker,
the snapshot holds a record that it should not. After a crash that record is counted twice:

```
{twice}
```

Nothing is ever lost in this way; Flink calls it at-least-once. The example also shows why
exactly-once has a price.

## And in onceflow?

Spark runs a query in epochs. An epoch takes a fixed range of offsets. All of the range goes through
every operator, and only then the next epoch begins. So the end of an epoch is a moment at which
**every process has received the marker and none has continued**: each source is at the end of its
range, the state contains all of it, and no record is between two operators. The snapshot of an
epoch is therefore the offsets, the version of the state, and what every output has published.
There is no channel to note. It is the aligned cut, and Spark waits between two epochs in any case.

onceflow needs one thing more, because its snapshot includes the targets: a crash in the middle of
publishing must not change the cut. The decision in the epoch log ensures that. One entry names the
offsets, the state and the rows of one attempt, so one atomic step makes the cut. After a crash,
onceflow publishes from this entry what is not published yet.

If a log or a topic connects two jobs, there are channels again: rows that one job has published and
the next has not read. A snapshot need not note them, because the log already keeps them. The
channel state of Chandy and Lamport's snapshot is the part of the log between the two offsets.
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
