"""Compare every output with the expected result.

Every number must be right in every output, and every row there once:

    events, rejected      each event once, each rejected line as often as it came
    counts                the panes of a minute add up; record ids are right and unique
    attributed            each order once, with what brought it and what it was worth; the answer
                          that it carries is the one that was staged
    serving, warehouse    the same rows as the streams
    charges               of each committed pane clicks times price, and their sum by campaign;
                          those are paused whose budget is spent, and no others
    late                  nothing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ads import outputs
from ads.budget import campaigns
from ads.outputs import Row
from ads.places import Places, columns
from ads.truth import Attribution, Truth, record_id, worth
from ads.world import ADS, ATTRIBUTED, COUNT, REGIONS, count_id, order_name

_SHOWN = 50  # differences in JSON


@dataclass(frozen=True)
class Difference:
    """Something that is in an output less or more often than expected."""

    target: str
    what: str
    truth: int
    found: int

    def __str__(self) -> str:
        return f"{self.target}: {self.what}: {self.found:,} instead of {self.truth:,}"


@dataclass(frozen=True)
class Verdict:
    """`lost` and `duplicated` count events, lines and rows; `compared` counts the numbers that were
    compared."""

    lost: int
    duplicated: int
    compared: int
    differences: tuple[Difference, ...]

    @property
    def exact(self) -> bool:
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        return {
            "exact": self.exact,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "compared": self.compared,
            "differences": len(self.differences),
            "first": [asdict(difference) for difference in self.differences[:_SHOWN]],
        }


@dataclass(frozen=True)
class Comparison:
    """How often each thing is expected in a target, and how often it is there."""

    target: str
    truth: Counter[Any]
    found: Counter[Any]
    is_sum: bool = False  # a sum of things that other comparisons count

    def differences(self) -> Iterator[Difference]:
        wrong = {x for x in {*self.truth, *self.found} if self.truth[x] != self.found[x]}
        for what in sorted(wrong, key=str):
            text = what if isinstance(what, str) else " ".join(map(str, what))
            yield Difference(self.target, text[:300], self.truth[what], self.found[what])


def check(places: Places | Path, truth: Truth, *, parts: tuple[str, ...] | None = None) -> Verdict:
    """Check all parts, or those that are named (see `PARTS`). `places`: or the folder."""
    if isinstance(places, Path):
        places = Places.from_environment(places)
    holds = Holds(places)
    found = [c for name in parts or PARTS for c in PARTS[name](holds, truth)]
    rows = [c for c in found if not c.is_sum]
    return Verdict(
        lost=sum((c.truth - c.found).total() for c in rows),
        duplicated=sum((c.found - c.truth).total() for c in rows),
        compared=sum(len({*c.truth, *c.found}) for c in found),
        differences=tuple(difference for c in found for difference in c.differences()),
    )


class Holds:
    """The rows of the outputs; rows that several parts need are read once."""

    def __init__(self, places: Places) -> None:
        self.places = places

    @cached_property
    def panes(self) -> list[Row]:
        return [row for region in REGIONS for row in outputs.stream(self.places, "counts", region)]

    @cached_property
    def orders(self) -> list[Row]:
        streams = [outputs.stream(self.places, "attributed", region) for region in REGIONS]
        return [row for stream in streams for row in stream]


# ---------------------------------------------------------------- the parts


def _events(holds: Holds, truth: Truth) -> Iterator[Comparison]:
    names = ("id", "kind", "at", "user", "restaurant", "ad", "order_id", "region")
    for region in REGIONS:
        rows = outputs.stream(holds.places, "events", region)
        yield Comparison(
            f"events/{region}",
            Counter(map(tuple, truth.events[region].values())),
            Counter(_tuple(row, names) for row in rows),
        )


def _rejected(holds: Holds, truth: Truth) -> Iterator[Comparison]:
    found = Counter(
        (region, row["value"], row["reason"])
        for region in REGIONS
        for row in outputs.stream(holds.places, "rejected", region)
    )
    yield Comparison("rejected", truth.rejected, found)


def _counts(holds: Holds, truth: Truth) -> Iterator[Comparison]:
    rows = holds.panes
    yield _sums("counts", rows, truth)
    yield _ids("counts", rows, {_count_id(row) for row in rows})


def _attributed(holds: Holds, truth: Truth) -> Iterator[Comparison]:
    rows, orders = holds.orders, truth.attributions()
    yield Comparison("attributed", Counter(orders.values()), _attributions(rows))
    yield _ids("attributed", rows, {(record_id(o), a.campaign) for o, a in orders.items()})
    said = ("region", "order_id", "value_cents", "courier")
    yield Comparison(
        "worth", Counter((*order, *worth(order)) for order in orders), _tuples(rows, said)
    )
    used = ("order_id", "value_cents", "courier", "answer_id")
    staged = outputs.answers(holds.places)
    named = [{**row, "order_id": order_name(row["region"], row["order_id"])} for row in rows]
    yield Comparison("answers", _tuples(staged, used), _tuples(named, used))


def _serving(holds: Holds, truth: Truth) -> Iterator[Comparison]:
    yield from _loaded("serving", holds, truth, outputs.table)


def _warehouse(holds: Holds, truth: Truth) -> Iterator[Comparison]:
    yield from _loaded("warehouse", holds, truth, outputs.warehouse)


def _loaded(
    where: str, holds: Holds, truth: Truth, read: Callable[[Places, str], list[Row]]
) -> Iterator[Comparison]:
    """The expected sums, and row by row the streams that were loaded."""
    minutes, orders = (read(holds.places, name) for name in ("ad_minutes", "attributions"))
    yield _sums(f"{where} ad_minutes", minutes, truth)
    yield Comparison(
        f"{where} attributions", Counter(truth.attributions().values()), _attributions(orders)
    )
    for name, schema, loaded, rows in (
        ("ad_minutes", COUNT, minutes, holds.panes),
        ("attributions", ATTRIBUTED, orders, holds.orders),
    ):
        names = columns(schema)
        yield Comparison(f"rows of {where} {name}", _tuples(rows, names), _tuples(loaded, names))


def _charges(holds: Holds, truth: Truth) -> Iterator[Comparison]:
    names = ("record_id", "region", "ad", "campaign", "clicks", "micros")
    committed = [
        {**row, "micros": row["clicks"] * ADS[row["ad"]].price_micros} for row in holds.panes
    ]
    charged = outputs.charges(holds.places)
    yield Comparison("charges", _tuples(committed, names), _tuples(charged, names))
    by_campaign: Counter[str] = Counter()
    for row in charged:
        by_campaign[row["campaign"]] += row["micros"]
    known = campaigns(holds.places)
    should = Counter(truth.spend_micros_by_campaign())
    spent = Counter({each.campaign: each.spent_micros for each in known})
    clicks = Counter({each.campaign: each.clicks for each in known})
    paused = Counter(each.campaign for each in known if each.paused)
    yield Comparison("charges, micro-units", should, by_campaign, is_sum=True)
    yield Comparison("campaigns, micro-units", should, spent, is_sum=True)
    yield Comparison("campaigns, clicks", Counter(truth.clicks_by_campaign()), clicks, is_sum=True)
    yield Comparison("campaigns, paused", Counter(truth.spent_campaigns()), paused, is_sum=True)


def _late(holds: Holds, truth: Truth) -> Iterator[Comparison]:
    found = Counter(
        (job, str(sorted(row.items(), key=str)))
        for job in ("aggregation", "attribution")
        for row in outputs.late(holds.places, job)
    )
    yield Comparison("late", Counter(), found)


PARTS: dict[str, Callable[[Holds, Truth], Iterator[Comparison]]] = {
    "events": _events,
    "rejected": _rejected,
    "counts": _counts,
    "attributed": _attributed,
    "serving": _serving,
    "warehouse": _warehouse,
    "charges": _charges,
    "late": _late,
}

# ---------------------------------------------------------------- how often a row is there


def _sums(target: str, rows: list[Row], truth: Truth) -> Comparison:
    """Impressions and clicks of each minute of an ad, over all panes."""
    should: Counter[Any] = Counter()
    for cell, (impressions, clicks) in truth.counts.items():
        should[*cell, "impressions"] = impressions
        should[*cell, "clicks"] = clicks
    found: Counter[Any] = Counter()
    for row in rows:
        cell = row["region"], row["ad"], row["minute"]
        found[*cell, "impressions"] += row["impressions"]
        found[*cell, "clicks"] += row["clicks"]
    return Comparison(target, should, found)


def _ids(target: str, rows: list[Row], right: set[tuple[str, str | None]]) -> Comparison:
    """Each record id once, and right."""
    found = Counter((row["record_id"], row["campaign"]) for row in rows)
    return Comparison(f"record ids of {target}", Counter(right), found)


def _count_id(row: Row) -> tuple[str, str]:
    id = count_id(row["region"], row["ad"], row["minute"], row["pane"])
    return id, ADS[row["ad"]].campaign


def _attributions(rows: list[Row]) -> Counter[Any]:
    return Counter(Attribution(*_tuple(row, Attribution._fields)) for row in rows)


def _tuples(rows: list[Row], names: tuple[str, ...] | list[str]) -> Counter[Any]:
    return Counter(_tuple(row, names) for row in rows)


def _tuple(row: Row, names: tuple[str, ...] | list[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


# ---------------------------------------------------------------- for people


@dataclass(frozen=True)
class CampaignLine:
    """A campaign: expected, committed and charged."""

    campaign: str
    truth_clicks: int
    clicks: int
    truth_spend_micros: int
    charged_micros: int
    paused: bool


def clicks_of(rows: list[Row]) -> Counter[str]:
    """Clicks by campaign, in rows of counts."""
    found: Counter[str] = Counter()
    for row in rows:
        found[row["campaign"]] += row["clicks"]
    return found


def by_campaign(places: Places, truth: Truth) -> list[CampaignLine]:
    clicks = clicks_of(Holds(places).panes)
    charged = {each.campaign: each for each in campaigns(places)}
    spend = truth.spend_micros_by_campaign()
    return [
        CampaignLine(
            campaign=name,
            truth_clicks=number,
            clicks=clicks[name],
            truth_spend_micros=spend[name],
            charged_micros=charged[name].spent_micros if name in charged else 0,
            paused=name in charged and charged[name].paused,
        )
        for name, number in truth.clicks_by_campaign().items()
    ]
