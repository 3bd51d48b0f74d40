"""The epoch protocol as steps on a shared world: `epoch.py`, with its races and nothing else.

A step is what the real system does atomically: one link(2), one rename, one SQL transaction, one
file that is read or written. It is named for the fault point that a driver reaches by it;
`log.*`, `spark.*`, `staged.*`, `folder.judged` and `epoch.begun` lie between two points. The epoch
log, the targets and Spark have a module each: `log`, `targets`, `spark`.
"""

from __future__ import annotations

from model.log import catch_up, won
from model.steps import Moves, Mutant, Settings, Short, step
from model.targets import publish
from model.world import DONE, STOPPED, Driver, World

# ==================================================================== opening


@step("open.led")
def lead(s: Settings, w: World, d: Driver) -> Moves:
    """1. lead: a term above every term seen; the lease gives out each one once."""
    d = d.but(term=w.lease + 1)
    then = catch_up(d, then="put.linked")
    yield "", w.but(lease=d.term), d.to("staged.swept") if s.has(Mutant.SWEEP_FIRST) else then


@step("open.fenced")
def fence(s: Settings, w: World, d: Driver) -> Moves:
    """2. fence: our entry is in the log, so no older term can decide. Then the ledgers."""
    leads = won(s, w, d)
    if leads:
        yield "", w.but(fenced=max(w.fenced, d.term)), leads.to("open.ledger-fenced")
    else:
        yield Short("not ours: again", w, catch_up(d.but(answered=True), then="put.linked"))


@step("open.ledgers-read", quiet=True)
def recover(s: Settings, w: World, d: Driver) -> Moves:
    """3. recover: publish what the last decision says and the ledgers don't have …"""
    adopt = d.last and not s.has(Mutant.EVALUATE_AGAIN)
    yield "", w, publish(s, d) if adopt else d.to("open.published")


@step("open.published", quiet=True)
def recovered(_: Settings, w: World, d: Driver) -> Moves:
    """… then make Spark's files agree with the decisions."""
    yield "", w, d.to("spark.file-set")


@step("open.spark-agrees", quiet=True)
def spark_agrees(_: Settings, w: World, d: Driver) -> Moves:
    """4. sweep: finish a roll-up that was killed …"""
    yield "", w, d.to("rollup.pruned-one")


@step("staged.swept")
def sweep_staged(_: Settings, w: World, d: Driver) -> Moves:
    """… and remove what older terms staged; all that was decided is published by now."""
    older = sorted({attempt for _, attempt in w.staged if attempt.term < d.term})
    for attempt in older:
        yield str(attempt), w.without_staged(attempt), d
    if not older:
        yield "nothing left", w, d.to("open.swept") if d.seen else catch_up(d, then="put.linked")


@step("open.swept", quiet=True)
def swept(_: Settings, w: World, d: Driver) -> Moves:
    yield "", w, d.to("open.ready")


@step("open.ready")
def put_in_no_data_epoch(s: Settings, w: World, d: Driver) -> Moves:
    """5. no-data: what Spark would have run, if the watermark moved in the last epoch."""
    last, d = d.last, catch_up(d, then="spark.read-offsets")
    yield "", w, d
    if s.no_data and last and last.end > last.start:
        note = f"offsets/{last.epoch + 1} is {last.end}: no data"
        yield note, w.with_file("offsets", last.epoch + 1, last.end), d


# ==================================================================== one epoch


@step("epoch.checked")
def check(s: Settings, w: World, d: Driver) -> Moves:
    """1. check: Spark planned what follows the last decision, and its file says so too."""
    plan, last = d.running._replace(file=w.offsets[d.running.epoch]), d.last
    epoch, end = (last.epoch + 1, last.end) if last else (0, 0)
    follows = plan.epoch == epoch
    if not s.has(Mutant.NO_OFFSETS):
        follows &= plan.file is not None and end == plan.start <= plan.end
        follows &= plan.file == plan.end or s.has(Mutant.TRUST_FILE)
    if s.has(Mutant.EVALUATE_AGAIN):
        follows |= plan.epoch == epoch - 1
    if follows:
        yield f"epoch {plan.epoch}", w, d.to("epoch.staged", attempt=plan)
    else:
        yield Short(f"{plan} does not follow: PlanChanged", w)


@step("epoch.staged")
def stage(_: Settings, w: World, d: Driver) -> Moves:
    """2. stage: rows and state of one attempt, where no reader sees them."""
    staged = w.staged | {(output, d.running) for output in range(len(w.targets))}
    yield str(d.running), w.but(staged=staged), d.to("epoch.hardened")


@step("epoch.hardened", quiet=True)
def harden(s: Settings, w: World, d: Driver) -> Moves:
    """3. harden: against power cuts, which are not modelled."""
    again = d.last and d.last.epoch == d.running.epoch
    decided = again or s.has(Mutant.PUBLISH_FIRST)
    yield "", w, publish(s, d) if decided else catch_up(d, then="put.linked")


@step("epoch.decided")
def decide(s: Settings, w: World, d: Driver) -> Moves:
    """4. decide: the put was the commit point. From here on the epoch will be published."""
    decided = won(s, w, d)
    if decided:
        then = decided.to("epoch.published")
        then = then if s.has(Mutant.PUBLISH_FIRST) else publish(s, decided)
        yield f"epoch {d.running.epoch}", w, then
    else:
        yield Short("not ours: Fenced", w, d.to("staged.given-up"))


@step("staged.given-up")
def give_up(_: Settings, w: World, d: Driver) -> Moves:
    yield str(d.running), w.without_staged(d.running), STOPPED


@step("epoch.output-published", quiet=True)
def output_published(s: Settings, w: World, d: Driver) -> Moves:
    """5. publish: one output after the other; in recovery too."""
    if d.output + 1 < len(s.outputs):
        then = publish(s, d.but(output=d.output + 1))
    elif d.attempt is None:
        then = d.to("open.published", output=0)
    elif s.has(Mutant.PUBLISH_FIRST) and d.last != d.attempt:
        then = catch_up(d.but(output=0), then="put.linked")
    else:
        then = d.to("epoch.published", output=0)
    yield s.outputs[d.output], w, then


@step("epoch.published", quiet=True)
def published(_: Settings, w: World, d: Driver) -> Moves:
    """6. sweep, while Spark commits this epoch and plans the next."""
    yield "", w, d.to("spark.committed", sweeping="staged.removed")


@step("staged.removed")
def sweep(s: Settings, w: World, d: Driver) -> Moves:
    """What was staged goes; a roll-up is due now and then."""
    assert d.last is not None
    w = w.without_staged(d.last)
    yield str(d.last), w, d.but(sweeping="epoch.swept")
    if s.roll_ups and len(d.decisions) > 1:
        yield str(d.last), w, d.but(sweeping="rollup.written")


@step("epoch.swept", quiet=True)
def epoch_swept(_: Settings, w: World, d: Driver) -> Moves:
    yield "", w, DONE if d.next == "done" else d.but(sweeping="")
