"""The explorer, on a system whose states can be counted by hand."""

from __future__ import annotations

from collections.abc import Iterator

from model.explorer import Broken, Violation, explore

Counter = tuple[int, int]  # the number, and how many have added to it
Adder = tuple[str, int]  # what it does next, and what it has read


class Adders:
    """Each reads a number, then writes it plus one: all the world's favourite race."""

    def __init__(self, count: int, *, atomic: bool = False, bound: int = 99) -> None:
        self.count, self.atomic, self.bound = count, atomic, bound

    def begin(self) -> tuple[Counter, tuple[Adder, ...]]:
        return (0, 0), (("read", 0),) * self.count

    def steps(self, world: Counter, process: Adder) -> Iterator[tuple[str, Counter, Adder]]:
        number, done = world
        step, read = process
        if self.atomic and step == "read":
            yield "adds", (number + 1, done + 1), ("end", 0)
        elif step == "read":
            yield f"reads {number}", world, ("think", number)
        elif step == "think":
            yield "thinks", world, ("write", read)
        elif step == "write":
            yield f"writes {read + 1}", (read + 1, done + 1), ("end", 0)

    def quiet(self, process: Adder) -> bool:
        return process[0] == "think"

    def judge(self, world: Counter) -> Broken | None:
        return Broken("bound", "too many") if world[1] > self.bound else None

    def judge_step(self, before: Counter, process: Adder, after: Counter) -> Broken | None:
        return Broken("no way back", "the number did not grow") if after[0] < before[0] else None

    def judge_end(self, world: Counter) -> Broken | None:
        number, done = world
        return Broken("sum", f"{done} added, the number is {number}") if number < done else None


def test_every_state_is_found_once_whatever_the_order_of_the_processes() -> None:
    found = explore(Adders(3, atomic=True))
    assert found.violation is None
    assert (found.states, found.worlds, found.depth) == (4, 4, 3)


def test_a_race_is_found_by_a_shortest_trace_that_names_quiet_steps_too() -> None:
    found = explore(Adders(2))
    assert found.violation == Violation(
        "sum",
        "2 added, the number is 1",
        ("reads 0", "thinks", "reads 0", "thinks", "writes 1", "writes 1"),
    )
    # Nobody has read; one has; both have. One has written, and the other has read nothing, 0 or 1.
    # Both have written, and the number is 1 or 2.
    assert found.states == 8


def test_a_rule_about_steps_stops_the_search_where_it_is_broken() -> None:
    found = explore(Adders(3))
    assert found.violation is not None
    assert found.violation.rule == "no way back"
    assert found.violation.trace[-1] == "writes 1"


def test_a_world_that_breaks_a_rule_stops_the_search_too() -> None:
    found = explore(Adders(3, atomic=True, bound=1))
    assert found.violation == Violation("bound", "too many", ("adds", "adds"))
    assert explore(Adders(1, bound=-1)).violation == Violation("bound", "too many", ())
