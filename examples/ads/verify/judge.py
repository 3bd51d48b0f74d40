"""The verdict on the rows: every output, compared with the expected result of the generator."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from ads.check import Difference, Holds, check
from ads.outputs import Row
from ads.places import Places
from ads.truth import Truth
from onceflow.harness.checker import Violation
from onceflow.harness.target_reader import read
from onceflow.harness.targets import Corrupt, Target

# who writes which parts of the check
PARTS = {
    "aggregation": ("events", "rejected", "counts"),
    "attribution": ("attributed", "late"),
    "load": ("serving", "warehouse"),
    "budget": ("charges",),
}
_EXAMPLES = 3


def judge(who: str, places: Places, truth: Truth) -> Iterator[Violation]:
    """All violations in the outputs of a job, or of the budget service."""
    found: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    for difference in check(places, truth, parts=PARTS[who]).differences:
        found[_kind(difference), difference.target].append(difference)
    for (kind, where), some in found.items():
        examples = "; ".join(
            f"{d.what}: {d.found:,} instead of {d.truth:,}" for d in some[:_EXAMPLES]
        )
        yield Violation(kind, where, f"{len(some):,} differ, such as {examples}", len(some))


def _kind(difference: Difference) -> str:
    if difference.found < difference.truth:
        return "lost"
    return "duplicated" if difference.truth else "corrupt"


# ---------------------------------------------------------------- forks


def forked(name: str, targets: list[Target], places: Places, truth: Truth) -> Iterator[Violation]:
    """A fork begins at a cut and ends before its parent: it has a part of the expected rows, each
    once."""
    holds = Holds(places)
    for target in targets:
        where = f"{name}/{target.output}"
        try:
            end = read(target, name)
        except Corrupt as error:
            yield Violation("corrupt", where, str(error))
            continue
        rows = [dict(zip(end.names, row, strict=True)) for row in end.rows]
        should, has = _compared(target.output, rows, holds, truth)
        more = has - should
        if more:
            examples = ", ".join(str(what) for what in sorted(more, key=str)[:_EXAMPLES])
            kind = "duplicated" if any(what in should for what in more) else "corrupt"
            yield Violation(kind, where, f"{more.total():,} too many, such as {examples}")


def _compared(
    output: str, rows: list[Row], holds: Holds, truth: Truth
) -> tuple[Counter[Any], Counter[Any]]:
    """The most rows that an output of a fork may hold, and those that it holds."""
    query, _, name = output.partition("/")
    stream, _, region = name.partition("_")
    match stream:
        case "events":
            return Counter(truth.events[region].keys()), Counter(row["id"] for row in rows)
        case "rejected":
            return truth.rejected, Counter((region, r["value"], r["reason"]) for r in rows)
        case "counts":
            most: Counter[Any] = Counter()
            for (of, ad, minute), numbers in truth.counts.items():
                for kind, number in zip(("impressions", "clicks"), numbers, strict=True):
                    most[of, ad, minute, kind] = number
            has: Counter[Any] = Counter()
            for row in rows:
                for kind in ("impressions", "clicks"):
                    has[row["region"], row["ad"], row["minute"], kind] += row[kind]
            return most, has
        case "serving" | "warehouse":
            loaded = holds.panes if query == "counts" else holds.orders
            return _by(("record_id",), loaded), _by(("record_id",), rows)
        case "once.late" | "attribution.late":
            return Counter(), Counter(map(str, rows))
    names = ("region", "order_id", "matched", "ad", "matched_at")
    orders = [attribution._asdict() for attribution in truth.attributions().values()]
    return _by(names, orders), _by(names, rows)


def _by(names: tuple[str, ...], rows: list[Row]) -> Counter[Any]:
    return Counter(tuple(row[name] for name in names) for row in rows)
