"""The truth of the reference application, looked at by hand and by brute force."""

from __future__ import annotations

import random
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from ads.generator import Event, Generator, Line
from ads.truth import Truth
from ads.world import ADS, BEGIN, WINDOW

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)
MOMENT = timedelta(microseconds=1)


def event(kind: str, at: datetime, *, ad: str | None = "ad-01", user: str = "ann") -> Event:
    number = f"{kind} {at} {ad} {user}"
    restaurant = "restaurant-01"
    if kind == "order":
        return Event(number, kind, at, user, restaurant, None, f"order of {user}", "eu")
    return Event(number, kind, at, user, restaurant, ad, None, "eu")


def truth_of(*events: Event) -> Truth:
    truth = Truth()
    truth.add({"eu": [Line(e.id, e.at, e, None, False) for e in events]})
    return truth


def matched(*events: Event) -> tuple[str | None, str | None, datetime | None]:
    found = truth_of(*events).attributions()["eu", "order of ann"]
    return found.matched, found.ad, found.matched_at


def test_the_last_click_wins_over_any_impression() -> None:
    first, last = NOON - timedelta(days=2), NOON - timedelta(days=1)
    shown = event("impression", NOON - MOMENT)
    clicks = event("click", first), event("click", last, ad="ad-31")
    assert matched(event("order", NOON), shown, *clicks) == ("click", "ad-31", last)


def test_without_a_click_it_is_the_last_impression_and_without_that_nothing() -> None:
    shown = event("impression", NOON - timedelta(hours=1))
    assert matched(event("order", NOON), shown) == ("impression", "ad-01", shown.at)
    assert matched(event("order", NOON)) == (None, None, None)


def test_an_order_that_is_told_under_two_ids_counts_once() -> None:
    order = event("order", NOON)
    truth = truth_of(order, order._replace(id="another"), order)
    assert (truth.ordered, truth.again, list(truth.attributions())) == (
        1,
        2,
        [("eu", "order of ann")],
    )
    assert [*truth.events["eu"]] == [order.id]


def test_the_window_is_seven_days_with_both_ends() -> None:
    order = event("order", NOON)
    for at, kind in (
        (NOON, "click"),
        (NOON + MOMENT, None),
        (NOON - WINDOW, "click"),
        (NOON - WINDOW - MOMENT, None),
    ):
        assert matched(order, event("click", at))[0] == kind


def test_an_old_click_gives_way_to_an_impression_and_others_do_not_count() -> None:
    old = event("click", NOON - WINDOW - timedelta(days=1))
    shown = event("impression", NOON - timedelta(days=6))
    others = event("click", NOON - MOMENT, user="bob")
    assert matched(old, shown, others, event("order", NOON))[0] == "impression"


@pytest.fixture(scope="module")
def chunks() -> list[dict[str, list[Line]]]:
    generator = Generator(11, per_minute=600)
    return [generator.chunk() for _ in range(200)]


def test_attribution_is_what_brute_force_finds(chunks: list[dict[str, list[Line]]]) -> None:
    truth = Truth()
    for lines in chunks:
        truth.add(lines)
    found = truth.attributions()
    events = [event for some in truth.events.values() for event in some.values()]
    orders = [event for event in events if event.order]
    assert len(found) == len(orders) > 200
    for order in orders:
        best = max(
            (
                (e.kind == "click", e.at, e.ad)
                for e in events
                if e.kind != "order"
                and (e.region, e.user, e.restaurant) == (order.region, order.user, order.restaurant)
                and order.at - WINDOW <= e.at <= order.at
            ),
            default=None,
        )
        match = found[order.region, order.order or ""]
        assert (match.user, match.ordered_at) == (order.user, order.at)
        if best is None:
            assert match[-4:] == (None, None, None, None)
        else:
            kind = "click" if best[0] else "impression"
            assert match[-4:] == (kind, best[2], ADS[best[2] or ""].campaign, best[1])
    matches = Counter(match.matched for match in found.values())
    assert min(matches["click"], matches["impression"], matches[None]) > 10


def test_some_orders_come_just_after_the_window_of_their_click() -> None:
    generator, truth = Generator(1), Truth()
    for _ in range(400):
        truth.add(generator.chunk())
    found = truth.attributions()
    clicked = {
        (e.user, e.restaurant)
        for some in truth.events.values()
        for e in some.values()
        if e.kind == "click" and e.at < BEGIN - WINDOW
    }
    alone = [a for a in found.values() if a.ordered_at > BEGIN and a.matched is None]
    assert any((a.user, a.restaurant) in clicked for a in alone)


def test_it_does_not_matter_in_which_order_lines_are_added(
    chunks: list[dict[str, list[Line]]],
) -> None:
    forward, shuffled = Truth(), Truth()
    for lines in chunks:
        forward.add(lines)
    chance = random.Random(5)
    for lines in chance.sample(chunks, len(chunks)):
        shuffled.add({region: chance.sample(some, len(some)) for region, some in lines.items()})
    assert shuffled.counts == forward.counts
    assert shuffled.events == forward.events
    assert shuffled.rejected == forward.rejected
    assert shuffled.attributions() == forward.attributions()


def test_totals_by_campaign_are_those_of_the_counts(chunks: list[dict[str, list[Line]]]) -> None:
    truth, lines, again = Truth(), 0, 0
    for some in chunks:
        truth.add(some)
        lines += sum(map(len, some.values()))
        again += sum(line.again for region in some.values() for line in region)
    clicks: Counter[str] = Counter()
    spend: Counter[str] = Counter()
    for (_, ad, _), (_, number) in truth.counts.items():
        clicks[ADS[ad].campaign] += number
        spend[ADS[ad].campaign] += number * ADS[ad].price_micros
    assert truth.clicks_by_campaign() == clicks
    assert truth.spend_micros_by_campaign() == spend
    events = sum(map(len, truth.events.values()))
    assert truth.again == again > 0
    assert lines == truth.lines == events + again + truth.rejected.total()


def test_a_rejected_line_counts_as_often_as_it_comes() -> None:
    truth, line = Truth(), Line("[]", NOON, None, "not JSON", False)
    truth.add({"eu": [line, line], "us": [line]})
    assert truth.rejected == {("eu", "[]", "not JSON"): 2, ("us", "[]", "not JSON"): 1}
