"""The expected result of every output, in plain Python from the generator's lines alone."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple
from uuid import uuid5
from zlib import crc32

from ads.generator import Event, Line
from ads.world import ADS, BUDGETS, CAMPAIGNS, NAMESPACE, REGIONS, WINDOW

Order = tuple[str, str]  # region, number
Cell = tuple[str, str, datetime]  # region, ad, minute


class Attribution(NamedTuple):
    """An order goes to the last click before it, else to the last impression, else to nothing."""

    region: str
    order_id: str
    user: str
    restaurant: str
    ordered_at: datetime
    matched: str | None
    ad: str | None
    campaign: str | None
    matched_at: datetime | None


class Truth:
    """Add the lines in any order. Each event counts once, however often it was received, and an
    order once under whatever ids it was told; each rejected line as often as it came."""

    def __init__(self) -> None:
        self.events: dict[str, dict[str, Event]] = {region: {} for region in REGIONS}  # by id
        self._orders: set[Order] = set()
        self.rejected: Counter[tuple[str, str, str]] = Counter()  # region, line, reason
        self.lines = 0
        self.again = 0  # lines that brought an event that was there
        self.counted = self.ordered = 0  # impressions and clicks; orders
        self._impressions: Counter[Cell] = Counter()
        self._clicks: Counter[Cell] = Counter()
        self._clicks_of = dict.fromkeys(CAMPAIGNS, 0)
        self._spend_of = dict.fromkeys(CAMPAIGNS, 0)

    def add(self, lines: Mapping[str, Iterable[Line]]) -> None:
        for region, some in lines.items():
            for line in some:
                self.lines += 1
                if line.event is None:
                    self.rejected[region, line.value, line.reason or ""] += 1
                elif line.event.id in self.events[region] or self._is_told(line.event):
                    self.again += 1
                else:
                    self.events[region][line.event.id] = line.event
                    self._count(line.event)

    def _is_told(self, order: Event) -> bool:
        """Has this order come before, under another id?"""
        if order.order is None:
            return False
        number = order.region, order.order
        told = number in self._orders
        self._orders.add(number)
        return told

    def _count(self, event: Event) -> None:
        if event.kind == "order" or event.ad is None:
            self.ordered += 1
            return
        self.counted += 1
        cell = event.region, event.ad, event.at.replace(second=0, microsecond=0)
        if event.kind == "impression":
            self._impressions[cell] += 1
        else:
            self._clicks[cell] += 1
            ad = ADS[event.ad]
            self._clicks_of[ad.campaign] += 1
            self._spend_of[ad.campaign] += ad.price_micros

    @property
    def counts(self) -> dict[Cell, tuple[int, int]]:
        """Impressions and clicks."""
        cells = {*self._impressions, *self._clicks}
        return {cell: (self._impressions[cell], self._clicks[cell]) for cell in cells}

    def clicks_by_campaign(self) -> dict[str, int]:
        return dict(self._clicks_of)

    def spend_micros_by_campaign(self) -> dict[str, int]:
        return dict(self._spend_of)

    def spent_campaigns(self) -> set[str]:
        """Those whose clicks cost as much as their budget, or more."""
        return {name for name, spend in self._spend_of.items() if spend >= BUDGETS[name]}

    def attributions(self) -> dict[Order, Attribution]:
        """By order. As if all events had been there from the beginning, in the order of their
        times: it does not matter which of them was received first."""
        found = {}
        for events in self.events.values():
            seen: defaultdict[tuple[str, str, str], list[Event]] = defaultdict(list)
            for event in sorted(events.values(), key=lambda event: event.at):
                seen[event.kind, event.user, event.restaurant].append(event)
            for order in events.values():
                if order.order is not None:
                    click = _last(seen["click", order.user, order.restaurant], order)
                    shown = _last(seen["impression", order.user, order.restaurant], order)
                    found[order.region, order.order] = _attribution(order, click or shown)
        return found


def record_id(order: Order) -> str:
    """Of what is said of an order; in words of its own, not in those of the job."""
    return str(uuid5(NAMESPACE, "attribution/{}/{}".format(*order)))


def worth(order: Order) -> tuple[int, str]:
    """What the order service says an order was worth, in cents, and who brought it."""
    number = crc32("{}/{}".format(*order).encode())
    return 800 + number % 5_000, f"courier-{number % 97:02d}"


def _last(events: list[Event], order: Event) -> Event | None:
    """The last one at or before the order, if it is not older than the window."""
    number = bisect_right(events, order.at, key=lambda event: event.at)
    if number == 0 or events[number - 1].at < order.at - WINDOW:
        return None
    return events[number - 1]


def _attribution(order: Event, match: Event | None) -> Attribution:
    assert order.order is not None
    ad = ADS[match.ad] if match and match.ad else None
    return Attribution(
        region=order.region,
        order_id=order.order,
        user=order.user,
        restaurant=order.restaurant,
        ordered_at=order.at,
        matched=match.kind if match else None,
        ad=ad.name if ad else None,
        campaign=ad.campaign if ad else None,
        matched_at=match.at if match else None,
    )
