"""Who leads a job: leases that are held, left by the dead, taken over and raced for."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from another import as_another, folder_for_all

from onceflow import faults
from onceflow.errors import Fenced, LeaseHeld
from onceflow.protocol import lease as lease_module
from onceflow.protocol.lease import Holder, Lease, host_name
from onceflow.store.posix import LocalStore, seal
from onceflow.testing.processes import CONTEXT, Child, child

JOB = "word-count"


def lead(pipe: Connection, folder: Path, host: str = "") -> None:
    """A driver in a process of its own. It leads until the test ends or kills it."""
    if host:
        os.environ["ONCEFLOW_HOST"] = host
    lease = Lease(folder, JOB)
    lease.acquire()
    lease.next_term(0)
    pipe.send(lease.holder())
    pipe.recv()
    lease.release()
    pipe.send("released")
    pipe.recv()


@contextlib.contextmanager
def leading(folder: Path, host: str = "") -> Iterator[tuple[Child, Holder]]:
    with child(lead, folder, host) as driver:
        yield driver, driver.hear()


@pytest.fixture
def leases(tmp_path: Path) -> Iterator[Callable[[], Lease]]:
    """Makes leases of this process, all on one folder, and gives them back at the end."""
    made: list[Lease] = []

    def make() -> Lease:
        made.append(Lease(tmp_path, JOB))
        return made[-1]

    yield make
    for lease in made:
        lease.release()


def taken(lease: Lease, *, above: int = 0, take_over: bool = False) -> int:
    lease.acquire(take_over=take_over)
    return lease.next_term(above)


def dies(lease: Lease) -> None:
    """As the kernel leaves it after `kill -9`: the lock is free, the file is there."""
    assert lease._fd is not None
    os.close(lease._fd)
    lease._fd = None


def terms_in(folder: Path) -> list[int]:
    return sorted(int(p.stem) for p in folder.glob("*.json"))


# ---------------------------------------------------------------- one driver


def test_the_first_driver_leads_with_term_one(leases: Callable[[], Lease]) -> None:
    lease = leases()
    assert lease.holder() is None
    assert taken(lease) == 1
    holder = lease.holder()
    assert holder is not None
    assert (holder.term, holder.pid, holder.host) == (1, os.getpid(), host_name())
    assert lease.alive(holder)


def test_terms_strictly_grow_whatever_was_seen_elsewhere(leases: Callable[[], Lease]) -> None:
    lease = leases()
    lease.acquire()
    terms = [lease.next_term(above) for above in (0, 0, 7, 3, 8, 8, 100, 0)]
    assert terms == [1, 2, 8, 9, 10, 11, 101, 102]


def test_terms_grow_over_the_lives_of_drivers(leases: Callable[[], Lease]) -> None:
    terms = []
    for _ in range(3):
        lease = leases()
        terms.append(taken(lease))
        lease.release()
        lease = leases()
        terms.append(taken(lease))
        dies(lease)
    assert terms == [1, 2, 3, 4, 5, 6]


def test_only_the_newest_term_and_its_lock_stay_on_the_disk(
    leases: Callable[[], Lease], tmp_path: Path
) -> None:
    for _ in range(3):
        lease = leases()
        taken(lease)
        dies(lease)
    lease = leases()
    taken(lease)
    assert terms_in(tmp_path) == [4]
    assert len(os.listdir(tmp_path)) == 2


def test_a_lease_that_was_released_can_be_taken_again(leases: Callable[[], Lease]) -> None:
    lease = leases()
    assert taken(lease) == 1
    lease.release()
    lease.release()
    assert taken(lease) == 2


# ---------------------------------------------------------------- a second driver


@pytest.mark.kill
def test_a_second_process_is_refused_and_told_who_leads(
    tmp_path: Path, leases: Callable[[], Lease]
) -> None:
    with leading(tmp_path) as (driver, holder):
        with pytest.raises(LeaseHeld) as caught:
            leases().acquire()
        told = caught.value.message
        assert f"process {driver.pid} on {host_name()}, since {holder.since}" in told
        assert JOB in told
        assert "--take-over" in caught.value.hint
        assert terms_in(tmp_path) == [1]

        assert driver.ask("release") == "released"
        assert taken(leases()) == 2


def test_a_second_lease_in_the_same_process_is_refused(leases: Callable[[], Lease]) -> None:
    first = leases()
    taken(first)
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()} "):
        leases().acquire()
    assert first.next_term(0) == 2


@pytest.mark.kill
def test_the_lease_of_a_dead_process_is_taken(tmp_path: Path, leases: Callable[[], Lease]) -> None:
    with leading(tmp_path) as (driver, holder):
        os.kill(driver.pid, signal.SIGKILL)
        driver.ended()
    lease = leases()
    assert not lease.alive(holder)
    assert taken(lease) == 2


def test_a_process_that_does_not_lead_yet_can_be_overtaken(leases: Callable[[], Lease]) -> None:
    """Both saw a dead holder; the second took its term before the first did."""
    first, second = leases(), leases()
    first.acquire()
    assert taken(second) == 1
    with pytest.raises(LeaseHeld, match=r"\(term 1\)"):
        first.next_term(50)


def test_a_leader_that_was_replaced_gets_no_further_term(leases: Callable[[], Lease]) -> None:
    first, second = leases(), leases()
    taken(first)
    assert taken(second, take_over=True) == 2
    with pytest.raises(LeaseHeld, match=r"\(term 2\)"):
        first.next_term(0)


# ---------------------------------------------------------------- take-over


@pytest.mark.kill
def test_take_over_ends_the_holder(tmp_path: Path, leases: Callable[[], Lease]) -> None:
    with leading(tmp_path) as (driver, _):
        assert taken(leases(), take_over=True) == 2
        assert driver.ended() == -signal.SIGKILL


@pytest.mark.kill
def test_take_over_ends_a_holder_that_is_stopped(
    tmp_path: Path, leases: Callable[[], Lease]
) -> None:
    with leading(tmp_path) as (driver, holder):
        os.kill(driver.pid, signal.SIGSTOP)
        assert leases().alive(holder)  # a paused driver may wake up
        assert taken(leases(), take_over=True) == 2
        assert driver.ended() == -signal.SIGKILL


def forged(folder: Path, **changes: Any) -> Holder:
    """A lease document as some other driver wrote it, with a lock that this test may hold."""
    facts = {"term": 7, "pid": os.getpid(), "host": host_name(), "started": "1", "since": "today"}
    holder = Holder(**{**facts, "lock": "other.lock", **changes})
    LocalStore(folder).put_if_absent(f"{holder.term:012d}.json", seal("lease", JOB, asdict(holder)))
    (folder / holder.lock).touch()
    return holder


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(fd)


@pytest.mark.kill
def test_a_process_that_only_has_the_holders_number_is_not_ended(
    tmp_path: Path, leases: Callable[[], Lease]
) -> None:
    with leading(tmp_path / "another job") as (innocent, _):
        holder = forged(tmp_path, pid=innocent.pid, started="1")
        with locked(tmp_path / holder.lock):
            assert taken(leases(), take_over=True) == 8
        assert innocent.ask("release") == "released"


@pytest.mark.kill
def test_a_holder_whose_lock_is_free_is_not_ended(
    tmp_path: Path, leases: Callable[[], Lease]
) -> None:
    """It let the lease go; the process may be doing something else by now."""
    with leading(tmp_path) as (driver, _):
        assert driver.ask("release") == "released"
        assert taken(leases(), take_over=True) == 2
        assert driver.process.is_alive()


# ---------------------------------------------------------------- another machine


def test_a_holder_on_another_machine_counts_as_alive(
    tmp_path: Path, leases: Callable[[], Lease]
) -> None:
    forged(tmp_path, host="far-away", pid=4711)
    with pytest.raises(LeaseHeld, match="process 4711 on far-away, since today"):
        leases().acquire()
    assert taken(leases(), take_over=True) == 8


@pytest.mark.kill
def test_take_over_from_another_machine_ends_nobody_here(
    tmp_path: Path, leases: Callable[[], Lease]
) -> None:
    with leading(tmp_path, host="far-away") as (driver, holder):
        assert holder.host == "far-away"
        with pytest.raises(LeaseHeld, match="on far-away"):
            leases().acquire()
        assert taken(leases(), take_over=True) == 2
        assert driver.ask("release") == "released"


def test_the_machine_can_be_named(
    monkeypatch: pytest.MonkeyPatch, leases: Callable[[], Lease]
) -> None:
    monkeypatch.setenv("ONCEFLOW_HOST", "node-7")
    lease = leases()
    taken(lease)
    holder = lease.holder()
    assert holder is not None
    assert holder.host == "node-7"


# ---------------------------------------------------------------- races


def race(pipe: Connection, folders: list[Path], barrier: Any) -> None:
    """In every folder: try to lead at the same moment as the other, and hold on to it."""
    results: list[int | str] = []
    for folder in folders:
        lease = Lease(folder, JOB)
        barrier.wait(30)
        try:
            results.append(taken(lease))
        except Exception as error:  # judged by the test
            results.append(repr(error))
        barrier.wait(30)
        lease.release()
    pipe.send(results)


@pytest.mark.kill
def test_of_two_processes_that_race_for_a_dead_lease_exactly_one_leads(tmp_path: Path) -> None:
    folders = [tmp_path / str(n) for n in range(150)]
    for folder in folders:
        lease = Lease(folder, JOB)
        taken(lease, above=4)
        dies(lease)
    barrier = CONTEXT.Barrier(2)
    with child(race, folders, barrier) as a, child(race, folders, barrier) as b:
        outcomes = list(zip(a.hear(), b.hear(), strict=True))
    for outcome in outcomes:
        refusals = [result for result in outcome if result != 6]
        assert len(refusals) == 1, outcome
        assert refusals[0].startswith(("LeaseHeld", "Fenced")), outcome


def test_of_two_drivers_the_slower_is_told_who_leads(leases: Callable[[], Lease]) -> None:
    """The faster one takes the term, and sweeps, while the slower one is about to."""
    slow, fast = leases(), leases()
    slow.acquire()
    faults.arm("put.written", lambda _: taken(fast))
    with pytest.raises(LeaseHeld, match=f"process {os.getpid()} .*term 1"):
        slow.next_term(0)
    assert fast.next_term(0) == 2


def test_a_term_whose_name_was_freed_meanwhile_is_not_won(
    tmp_path: Path, leases: Callable[[], Lease]
) -> None:
    """The faster driver has moved on to term 2 and pruned 1, at which the slower one aims."""

    class Late(LocalStore):
        def put_if_absent(self, name: str, data: bytes) -> bool:
            assert [taken(fast), fast.next_term(0)] == [1, 2]
            return super().put_if_absent(name, data)

    slow, fast = leases(), leases()
    slow.acquire()
    slow._store = Late(tmp_path)
    with pytest.raises(Fenced, match=r"term 2"):
        slow.next_term(0)
    assert fast.next_term(0) == 3
    assert terms_in(tmp_path) == [3]


def test_looking_whether_a_dead_holder_lives_does_not_make_it_live(
    tmp_path: Path, leases: Callable[[], Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`onceflow status` looks at the lock at the moment at which a driver does."""
    holder = forged(tmp_path)
    real, answers = fcntl.flock, []

    def both(fd: int, operation: int) -> None:
        real(fd, operation)
        monkeypatch.setattr(lease_module.fcntl, "flock", real)
        answers.append(leases().alive(holder))

    monkeypatch.setattr(lease_module.fcntl, "flock", both)
    assert not leases().alive(holder)
    assert answers == [False]


def test_a_new_lock_that_was_pruned_before_it_was_locked_is_made_again(
    tmp_path: Path, leases: Callable[[], Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that prunes takes the file, not locked yet, for a dead driver's."""
    real, fast, slow = fcntl.flock, leases(), leases()

    def pruned_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(lease_module.fcntl, "flock", real)
        taken(fast)
        real(fd, operation)

    monkeypatch.setattr(lease_module.fcntl, "flock", pruned_first)
    slow.acquire()
    assert len(list(tmp_path.glob("*.lock"))) == 2
    with pytest.raises(LeaseHeld):
        slow.next_term(0)


def test_a_lock_that_is_locked_while_another_driver_prunes_is_not_pulled_away(
    tmp_path: Path, leases: Callable[[], Lease]
) -> None:
    """Its file was there and not locked yet when the pruning driver looked at it."""

    class Slow(LocalStore):
        def delete(self, name: str) -> None:
            if name == new._lock:
                new._fd = new._try_lock()
            super().delete(name)

    fast, new = leases(), leases()
    fast.acquire()
    fast._store = Slow(tmp_path)
    (tmp_path / new._lock).touch()
    fast.next_term(0)
    while new._fd is None:
        new._fd = new._try_lock()
    assert (tmp_path / new._lock).exists(), "it holds a lock that nobody can see"


def test_who_may_only_read_sees_who_lives() -> None:
    with folder_for_all() as folder:
        lease = Lease(folder / "lease", "shop")
        lease.acquire()
        lease.next_term(0)
        look = f"lease = Lease(Path({str(lease.folder)!r}), 'shop'); holder = lease.holder()"
        imports = "from pathlib import Path; from onceflow.protocol.lease import Lease"
        assert as_another(imports, f"{look}; print(lease.alive(holder))") == "True\n"
        assert lease._fd is not None
        os.close(lease._fd)  # as the kernel does when a process ends
        assert as_another(imports, f"{look}; print(lease.alive(holder))") == "False\n"


def test_since_is_a_time_in_utc(leases: Callable[[], Lease]) -> None:
    lease = leases()
    taken(lease)
    holder = lease.holder()
    assert holder is not None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", holder.since)
