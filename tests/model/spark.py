"""The steps of Spark on its own files, and the step of an opening that corrects them.

The Spark of a paused driver is paused with it: it reads and writes late."""

from __future__ import annotations

from model.log import catch_up
from model.steps import Moves, Mutant, Settings, Short, step
from model.world import DONE, Attempt, Driver, World


@step("spark.file-set")
def make_spark_agree(s: Settings, w: World, d: Driver) -> Moves:
    """Correct Spark's files from the epoch log, one by one: commit what is decided, and remove the
    rest."""
    last, wanted = d.last, list[tuple[str, int, int | None]]()
    if last in w.state_removed:
        yield Short(f"the state is gone: {last}: CheckpointRefused", w)
        return
    if s.has(Mutant.REMOVE_STATE) and not last and w.state_removed != {*w.decided}:
        yield "the state is removed", w.but(state_removed=frozenset(w.decided)), d
        return
    if not s.has(Mutant.NO_OFFSETS):
        wanted += [("offsets", attempt.epoch, attempt.file) for _, attempt in d.decisions[-2:]]
    if last and not s.has(Mutant.EVALUATE_AGAIN):
        wanted += [("commits", last.epoch, last.term)]
    above = range(last.epoch + 1 if last else 0, len(w.offsets))
    wanted += [("offsets", epoch, None) for epoch in reversed(above)]
    for number, (folder, epoch, value) in enumerate(wanted):
        if number >= d.agreed and getattr(w, folder)[epoch] != value:
            says = f"is of driver {value}" if folder == "commits" else f"is {value}"
            note = f"{folder}/{epoch} " + ("is removed" if value is None else says)
            yield note, w.with_file(folder, epoch, value), d.but(agreed=number + 1)
            return
    yield "all agree", w, d.to("open.spark-agrees", agreed=0)


@step("spark.read-offsets")
def read_offsets(_: Settings, w: World, d: Driver) -> Moves:
    """Spark starts: with its newest offsets …"""
    newest = max((n for n, end in enumerate(w.offsets) if end is not None), default=-1)
    end = w.offsets[newest] if newest >= 0 else 0
    start = w.offsets[newest - 1] if newest >= 1 else 0
    if start is None or end is None:
        yield Short(f"offsets/{newest - 1} is missing", w)
        return
    note = f"offsets/{newest} is {end}" if newest >= 0 else "none"
    yield note, w, d.to("spark.read-commits", attempt=Attempt(newest, start, end, d.term, 0))


@step("spark.read-commits")
def read_commits(_: Settings, w: World, d: Driver) -> Moves:
    """… which it runs if they are not committed; otherwise it continues behind them."""
    newest = max((n for n, state in enumerate(w.commits) if state is not None), default=-1)
    state, planned = (w.commits[newest] if newest >= 0 else 0) or 0, d.running
    note = f"commits/{newest}" if newest >= 0 else "none"
    if newest == planned.epoch:
        following = Attempt(newest + 1, planned.end, -1, d.term, state)
        yield note, w, d.to("spark.planned", attempt=following)
    elif newest == planned.epoch - 1:
        yield note, w, d.to("epoch.begun", attempt=planned._replace(base=state))
    else:
        yield Short(f"{note} is not next to offsets/{planned.epoch}", w)


@step("spark.planned")
def plan(s: Settings, w: World, d: Driver) -> Moves:
    """Spark plans the input that is there by now, and replaces a file of another driver's Spark."""
    epoch, start = d.running.epoch, d.running.start
    ends = list(range(start + 1, min(start + s.most, s.rows) + 1))
    if s.no_data and d.last and d.last.end > d.last.start:
        ends.append(start)
    for end in ends:
        then = d.to("epoch.begun", attempt=d.running._replace(end=end))
        yield f"offsets/{epoch} is {end}", w.with_file("offsets", epoch, end), then
    if start == s.rows:
        yield "no more input", w, d.to("done") if d.sweeping else DONE


@step("spark.committed")
def commit(_: Settings, w: World, d: Driver) -> Moves:
    epoch = d.running.epoch
    following = Attempt(epoch + 1, d.running.end, -1, d.term, d.term)
    w = w.with_file("commits", epoch, d.term)
    yield f"commits/{epoch}", w, d.to("spark.planned", attempt=following)


@step("epoch.begun")
def begin(_: Settings, w: World, d: Driver) -> Moves:
    """Spark calls `foreachBatch`, which waits for the sweep of the epoch before."""
    if not d.sweeping:
        yield f"epoch {d.running.epoch}", w, catch_up(d, then="epoch.checked")
