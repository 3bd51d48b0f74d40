"""Which fault strikes which job, in which order: a pure function of the seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from ads.verify import services
from onceflow.faults.points import TASK
from onceflow.harness import fault_schedule
from onceflow.harness.fault_schedule import KEYED, Fault

# job -> the kinds of its sinks, and whether it has keyed steps
CASES = {
    "aggregation": ("log", KEYED),
    "attribution": ("log", KEYED),
    "load": ("sqlite", "files"),
}
_JOBS = list(CASES)
# Those of a local run without servers. Only the built-in jobs can have a slow task.
KINDS = [
    kind
    for kind in fault_schedule.KINDS
    if kind not in (*fault_schedule.CLUSTER, *fault_schedule.SERVERS, "slow-task")
]
_SERVICES_EVERY = 5  # of so many faults one strikes a service


def faults(seed: int, count: int, kinds: Iterable[str], points: Iterable[str] = ()) -> list[Fault]:
    """The faults strike the jobs in turn."""
    rng = random.Random(f"{seed}/ads")
    wanted = list(kinds)
    own = [kind for kind in wanted if kind in services.KINDS]
    others = [kind for kind in wanted if kind not in services.KINDS]
    for_services = count if not others else min(count, -(-count // _SERVICES_EVERY)) if own else 0
    planned = fault_schedule.plan(
        seed, list(CASES.values()), count=count - for_services, kinds=others or KINDS, at=points
    )
    turns = [_turn(planned, fault) for fault in planned]
    found = [_fitted(rng, fault) for _, fault in sorted(zip(turns, planned, strict=True))]
    for number in range(for_services):
        kind = own[number % len(own)]
        strike = Fault(0, _JOBS.index(services.STRIKES[kind]), kind)
        strike = replace(strike, after=round(rng.uniform(0.0, 1.5), 3))
        found.insert((number + 1) * count // (for_services + 1), strike)
    return [replace(fault, number=number) for number, fault in enumerate(found)]


def _turn(planned: list[Fault], fault: Fault) -> tuple[int, int]:
    before = [other for other in planned if other.case == fault.case]
    return before.index(fault), fault.case


def _fitted(rng: random.Random, fault: Fault) -> Fault:
    """The fault, changed so that it fits this application."""
    job = _JOBS[fault.case]
    if fault.kind == "fail-task":
        if KEYED not in CASES[job]:  # its tasks have no fault points
            return replace(fault, kind="kill-worker", point="", file="")
        if not fault.point:
            return replace(fault, point=rng.choice(TASK), file=rng.choice(("raise", "kill")))
    if fault.file == "rewind" and job != "load":
        # Another job has read these rows, or the budget service has charged them.
        point = "" if fault.point.startswith("drop.") else fault.point
        return replace(fault, file="skip", point=point)
    return fault
