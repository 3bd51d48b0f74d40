"""The epoch log: catching up, put-if-absent at head + 1, roll-ups (`epoch_log`, `storage`)."""

from __future__ import annotations

from model.steps import Moves, Mutant, Settings, Short, step
from model.world import STOPPED, Driver, RollUp, World


def catch_up(d: Driver, *, then: str) -> Driver:
    return d.to("log.listed", then=then)


@step("log.listed")
def list_names(_: Settings, w: World, d: Driver) -> Moves:
    """From the newest roll-up, if it is ahead of us …"""
    number, term, carried = w.roll_up
    if number > d.position:
        decisions = tuple((number, attempt) for attempt in carried)
        d = d.but(position=number, seen=term, decisions=decisions)
    yield f"newest roll-up: {number or 'none'}", w, d.to("log.read", reading=d.position + 1)


@step("log.read")
def read_entry(_: Settings, w: World, d: Driver) -> Moves:
    """… entry by entry …"""
    number = d.position + 1
    entry = w.entry(number)
    if entry:
        yield f"log/{number} is {entry}", w, d.having_read(number, entry)
    else:
        yield f"log/{number} is not there", w, d.to("log.looked")


@step("log.looked")
def look_again(s: Settings, w: World, d: Driver) -> Moves:
    """… and what was read counts if no roll-up covers it by now."""
    first, d = d.reading, d.but(reading=0)
    if w.roll_up.number >= first:
        d = d.to("log.listed", position=0, seen=0, decisions=())
        yield Short("a roll-up covers it: again", w, d)
    elif w.entry(d.position + 1):
        yield Short("one more came: again", w, d.to("log.listed"))
    elif any(w.log[d.position :]):
        yield Short("an entry is missing: Damaged", w)
    else:
        yield from caught_up(s, w, d)


def caught_up(s: Settings, w: World, d: Driver) -> Moves:
    """A driver that fences may find only lower terms. Later it may find no entry after its own."""
    then, d = d.then, d.but(then="")
    fencing = then == "put.linked" and d.attempt is None
    if d.seen >= d.term if fencing else (d.position, d.seen) != (d.stood, d.term):
        staged = then == "put.linked" and not fencing
        then_stops = d.to("staged.given-up") if staged else STOPPED
        yield Short(f"term {d.seen} is there: Fenced", w, then_stops)
    elif fencing and s.has(Mutant.NO_FENCE):
        w = w.but(fenced=max(w.fenced, d.term))
        yield "no fence entry", w, d.to("open.ledger-fenced", stood=d.position, seen=d.term)
    else:
        yield f"the head is {d.position}", w, d.to(then)


@step("put.linked")
def put(_: Settings, w: World, d: Driver) -> Moves:
    """link(2) to head + 1: a fence or a decision. Its reply may get lost."""
    number = d.position + 1
    then = d.to("epoch.decided" if d.attempt else "open.fenced")
    if w.entry(number):
        yield f"log/{number} is taken", w, then.but(answered=False)
        return
    if d.attempt and number > w.roll_up.number:
        w = w.but(decided=(*w.decided, d.attempt))
    w = w.with_entry(number, d.entry)
    yield f"log/{number} is {d.entry}", w, then
    yield f"log/{number} is {d.entry}; the answer is lost", w, then.but(answered=False)


def won(s: Settings, w: World, d: Driver) -> Driver | None:
    """Was the put ours? And does no roll-up cover its name, so that it means nothing?"""
    number, ours = d.position + 1, d.answered
    if not ours and not s.has(Mutant.BELIEVE_LOST):
        ours = w.entry(number) == d.entry
    covered = w.roll_up.number >= number and not s.has(Mutant.BELIEVE_WON)
    if covered or not ours:
        return None
    return d.having_read(number, d.entry).but(stood=number, answered=True)


@step("rollup.written")
def roll_up(s: Settings, w: World, d: Driver) -> Moves:
    """One document covers all entries up to the last decision but one …"""
    number = d.decisions[-2][0]
    covered = [attempt for n, attempt in d.decisions if n <= number]
    if number > w.roll_up.number and not s.has(Mutant.NO_ROLL_UP):
        w = w.but(roll_up=RollUp(number, d.seen, tuple(covered[-2:])))
    kept = d.decisions[max(0, len(covered) - 2) :]
    yield f"up to log/{number}", w, d.but(sweeping="rollup.pruned-one", decisions=kept)


@step("rollup.pruned-one")
def prune(s: Settings, w: World, d: Driver) -> Moves:
    """… and then their names are freed, in any order."""
    number = w.roll_up.number
    if s.has(Mutant.NO_ROLL_UP) and d.sweeping:
        number = d.decisions[-2][0]
    left = [n for n in range(1, number + 1) if w.entry(n)]
    for n in left:
        yield f"log/{n}", w.with_entry(n, None), d
    if not left:
        then = d.but(sweeping="epoch.swept") if d.sweeping else d.to("staged.swept")
        yield "nothing left", w, then
