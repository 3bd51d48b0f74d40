"""The two services of the application as processes that are broken and started again.

The charges are checked the whole time: at every moment their sum is what the campaigns have spent,
and no charge ever goes away.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import ads
from ads.budget import budget_file
from ads.places import Places
from ads.world import REGIONS
from onceflow.harness.case_runner import CaseRunner, FaultOutcome
from onceflow.harness.checker import Violation
from onceflow.harness.fault_moments import wait_at_random
from onceflow.harness.fault_schedule import Fault
from onceflow.harness.processes import Child
from onceflow.log import EmbeddedLog
from onceflow.service.error_report import describe_exit
from onceflow.testing.servers.process import free_ports

# kind -> what it does, for people
KINDS = {
    "kill-budget": "kill -9 of the budget service, in the middle of a transaction if it can be",
    "kill-orders": "kill -9 of the order service, which is away for a while",
    "refuse-orders": "the order service answers each order with 503 when it is first asked for it",
}
STRIKES = {
    "kill-budget": "aggregation",
    "kill-orders": "attribution",
    "refuse-orders": "attribution",
}
_CAUGHT_WITHIN = 10.0  # seconds to find it in a transaction
_PROBES = 100
_CHARGES_WITHIN = 120.0
_STOPS_WITHIN = 60.0
_LOOK_EVERY = 0.5
_MOST = 20  # violations


class Service:
    """One process, started again and again."""

    def __init__(self, name: str, arguments: list[str], log: Path) -> None:
        self.name, self._arguments, self._log = name, arguments, log
        self._child: Child | None = None

    def start(self, *more: str) -> None:
        self.kill()
        root = str(Path(ads.__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._child = Child(
            self.name, ["ads.main:main", *self._arguments, *more], log=self._log,
            environment={**os.environ, "PYTHONPATH": path}, options=("-P",),
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._child.pid if self._child is not None else 0

    @property
    def exit_code(self) -> int | None:
        return None if self._child is None else self._child.exit_code

    def kill(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def stop(self, within: float) -> int:
        """SIGTERM: it finishes its work. Returns its exit code."""
        assert self._child is not None
        self._child.stop()
        deadline = time.monotonic() + within
        while self._child.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.02)
        code = self._child.exit_code
        self.kill()
        return -signal.SIGKILL if code is None else code


class Services:
    """Both services, running inside the block."""

    def __init__(self, places: Places, said: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.violations: list[Violation] = []
        self.budget = Service("budget", ["budget", "--folder", str(places.folder)], said)
        self.orders = Service("order service", ["order-service", "--port", str(port)], said)
        self._places, self._charged, self._looked = places, (0, 0), 0.0

    def __enter__(self) -> Services:
        for service in (self.budget, self.orders):
            service.start()
        return self

    def __exit__(self, *_: object) -> None:
        for service in (self.budget, self.orders):
            service.kill()

    def tend(self, *, may_end: bool) -> None:
        """Start a service that has ended. Without `may_end` its end is a violation."""
        for service in (self.budget, self.orders):
            code = service.exit_code
            if code is not None:
                if not may_end:
                    self._wrong("stuck", f"the {service.name} {describe_exit(code)}")
                service.start()
        if time.monotonic() - self._looked > _LOOK_EVERY:
            self._looked = time.monotonic()
            self._look()

    def charge_all(self, runner: CaseRunner) -> None:
        """Wait until everything committed is charged, then stop the budget service."""
        heads = {
            f"counts/{region}": EmbeddedLog(self._places.log("counts", region)).view.next
            for region in REGIONS
        }
        wanted = {(name, p): at for name, ends in heads.items() for p, at in enumerate(ends) if at}
        if not runner.wait(lambda: self._progress() == wanted, _CHARGES_WITHIN):
            self._wrong("stuck", f"read to {self._progress()}, committed is {wanted}")
        code = self.budget.stop(_STOPS_WITHIN)
        if code:
            self._wrong("stuck", f"when it is stopped the budget service {describe_exit(code)}")
        self._look()

    def _look(self) -> None:
        said = _rows(
            self._places,
            "SELECT (SELECT count(*) FROM charges), (SELECT sum(micros) FROM charges), "
            "(SELECT sum(clicks) FROM charges), sum(spent_micros), sum(clicks) FROM campaigns",
        )
        if not said:
            return
        charges, micros, clicks, spent, of_campaigns = (number or 0 for number in said[0])
        if (micros, clicks) != (spent, of_campaigns):
            self._wrong("torn", f"{clicks} clicks are charged for {micros}, and campaigns have "
                        f"{of_campaigns} for {spent}")  # fmt: skip
        if (charges, micros) < self._charged:
            self._wrong("backwards", f"{self._charged} were charged, now {(charges, micros)} are")
        self._charged = charges, micros

    def _progress(self) -> dict[tuple[str, int], int]:
        rows = _rows(self._places, "SELECT place, partition, next_offset FROM progress")
        return {(place, partition): at for place, partition, at in rows if at}

    def _wrong(self, kind: str, message: str) -> None:
        if len(self.violations) < _MOST:
            self.violations.append(Violation(kind, "budget.db" if kind != "stuck" else "services",
                                             message))  # fmt: skip

    # ---------------------------------------------------------------- faults

    def strike(self, runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
        acts: dict[str, Callable[[CaseRunner, Fault, FaultOutcome], None]] = {
            "kill-budget": self._kill_budget,
            "kill-orders": self._kill_orders,
            "refuse-orders": self._refuse_orders,
        }
        acts[fault.kind](runner, fault, outcome)

    def _kill_budget(self, runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
        wait_at_random(runner, fault)
        pid, before = self.budget.pid, self._charged
        inside = runner.wait(self._killed_inside, _CAUGHT_WITHIN)
        self.budget.kill()
        runner.hit(outcome, f"process {pid}{', in a transaction' if inside else ''}")
        self.budget.start()
        if not runner.wait(lambda: self._charged > before, _CHARGES_WITHIN):
            self._wrong("stuck", "nothing is charged after the kill of the budget service")

    def _killed_inside(self) -> bool:
        """Kill the budget service while it holds the lock of its database. Did that work?"""
        locked = 0
        with closing(sqlite3.connect(budget_file(self._places), timeout=0)) as db:
            for _ in range(_PROBES):
                try:
                    db.execute("BEGIN IMMEDIATE")
                    db.execute("ROLLBACK")
                    locked = 0
                except sqlite3.OperationalError:
                    locked += 1
                if locked == 2:
                    os.kill(self.budget.pid, signal.SIGKILL)
                    return True
                time.sleep(0.002)
        return False

    def _kill_orders(self, runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
        wait_at_random(runner, fault)
        pid = self.orders.pid
        self.orders.kill()
        away = 1 + 2 * fault.after
        runner.wait(lambda: False, away)
        runner.hit(outcome, f"process {pid}, away for {away:.1f} s")
        self.orders.start()

    def _refuse_orders(self, runner: CaseRunner, fault: Fault, outcome: FaultOutcome) -> None:
        wait_at_random(runner, fault)
        runner.hit(outcome, "from now on, until it is started again")
        self.orders.start("--failing", "1")


def _rows(places: Places, sql: str) -> list[tuple[int, ...]]:
    """Rows of budget.db; none if it can't be read now."""
    path = budget_file(places)
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            return db.execute(sql).fetchall()
    except sqlite3.OperationalError:  # not there yet, or no space for a lock
        return []
