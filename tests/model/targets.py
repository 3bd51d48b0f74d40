"""Targets: fencing a ledger, and publishing by compare-and-set (`ledger.py`, `sinks/`).

A table publishes in one transaction. A folder judges, renames, and puts a commit. Its commits are a
numbered log like the epoch log, which the model does not repeat: a commit follows the commits that
were judged, or it is lost and judged again, so the last judgement and the put are one step.
"""

from __future__ import annotations

from model.steps import Moves, Mutant, Settings, Short, step
from model.world import Attempt, Driver, Target, World


@step("open.ledger-fenced")
def fence_ledger(s: Settings, w: World, d: Driver) -> Moves:
    """Our term goes into the ledger of each output: no older term can publish from here on."""
    target = w.targets[d.output]
    if target.term >= d.term:
        yield Short(f"the ledger has term {target.term}: Fenced", w)
        return
    last = d.output + 1 == len(w.targets)
    then = d.to("open.ledgers-read", output=0) if last else d.but(output=d.output + 1)
    yield s.outputs[d.output], w.with_target(d.output, target._replace(term=d.term)), then


def judge(s: Settings, target: Target, rows: Attempt, term: int) -> str:
    """`ledger.judge`: "publish", "already published", or the error."""
    if s.has(Mutant.NO_LEDGER):
        return "Fenced" if target.term > term else "publish"
    if target.epoch == rows.epoch:
        again = s.has(Mutant.EVALUATE_AGAIN)  # other rows under the same decision
        return "already published" if target.shown[-1] == rows or again else "Fenced"
    if target.term > term and not s.has(Mutant.NO_TERM):
        return "Fenced"
    if target.epoch > rows.epoch:
        return "already published"
    return "publish" if target.epoch == rows.epoch - 1 else "TargetBehind"


def publish(s: Settings, d: Driver) -> Driver:
    """Publish the next output."""
    return d.to("sqlite.committed" if s.outputs[d.output] == "table" else "folder.judged")


def _publication(s: Settings, w: World, d: Driver) -> tuple[Attempt, str]:
    rows = d.attempt or d.last
    assert rows is not None
    return rows, judge(s, w.targets[d.output], rows, d.term)


@step("sqlite.committed")
def transact(s: Settings, w: World, d: Driver) -> Moves:
    """One transaction: the judgement, the rows and the ledger."""
    rows, verdict = _publication(s, w, d)
    then = d.to("epoch.output-published")
    if verdict == "already published":
        yield Short(verdict, w, then)
    elif verdict != "publish":
        yield Short(verdict, w)
    elif (d.output, rows) in w.staged:
        yield f"the table shows {rows}", w.showing(d.output, rows), then
    else:
        yield Short(f"what was staged is gone: {rows}", w)


@step("folder.judged")
def judge_folder(s: Settings, w: World, d: Driver) -> Moves:
    _, verdict = _publication(s, w, d)
    then = {"publish": "folder.moved", "already published": "epoch.output-published"}
    if verdict in then:
        yield verdict, w, d.to(then[verdict])
    else:
        yield Short(verdict, w)


@step("folder.moved")
def move(s: Settings, w: World, d: Driver) -> Moves:
    """Rename moves the only copy. A driver that does not find it checks the final name."""
    rows, _ = _publication(s, w, d)
    file, then = (d.output, rows), d.to("folder.committed")
    if file in w.staged:
        yield str(rows), w.but(staged=w.staged - {file}, moved=w.moved | {file}), then
    elif file in w.moved or rows in w.targets[d.output].shown:
        yield "it is in place", w, then
    else:
        yield Short(f"what was staged is gone: {rows}", w)


@step("folder.committed")
def commit(s: Settings, w: World, d: Driver) -> Moves:
    """One commit: it lists the file and carries the ledger."""
    rows, verdict = _publication(s, w, d)
    then = d.to("epoch.output-published")
    if verdict == "publish":
        yield f"the folder shows {rows}", w.showing(d.output, rows), then
    elif verdict == "already published":
        yield Short(verdict, w, then)
    else:
        yield Short(verdict, w)
