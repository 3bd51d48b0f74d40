"""Which tests run on which day."""

from __future__ import annotations

from rotation import DAYS, chosen

TESTS = [f"tests/spark/test_x.py::test_y[{number}]" for number in range(200)]


def test_every_long_test_comes_once_in_any_ten_days() -> None:
    seconds = {name: float(number % 37) for number, name in enumerate(TESTS)}
    for first in (0, 7, 20_776):
        shares = [chosen(TESTS, seconds, first + day) for day in range(DAYS)]
        assert set().union(*shares) == set(TESTS)
        assert sum(map(len, shares)) == len(TESTS)


def test_days_take_about_as_long() -> None:
    seconds = {name: 1.0 + number % 20 for number, name in enumerate(TESTS)}
    share = sum(seconds.values()) / DAYS
    for day in range(DAYS):
        takes = sum(seconds[name] for name in chosen(TESTS, seconds, day))
        assert abs(takes - share) <= 20, "no more than the longest test beside an equal share"


def test_a_new_test_leaves_most_others_on_their_days() -> None:
    more = [*TESTS, "tests/spark/test_new.py::test_z"]
    moved = sum(
        bool((chosen(TESTS, {}, day) ^ chosen(more, {}, day)) & set(TESTS)) for day in range(DAYS)
    )
    changed = {n for day in range(DAYS) for n in chosen(TESTS, {}, day) - chosen(more, {}, day)}
    assert len(changed) <= DAYS, moved


def test_without_long_tests_there_is_nothing_to_choose() -> None:
    assert chosen([], {}, 3) == set()
