"""Which ad sold it? Orders with the last click of the same user and restaurant within seven days,
else with the last impression, whichever of order and ad event comes first.

    python -m examples.attribution

makes three weeks of events that come up to an hour out of order, and some days too late, into a
log; runs the job, which is killed with `kill -9` on the way and started again; and compares what
it wrote with the expected result, which plain Python computes from the events.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from onceflow import Flow, job
from onceflow.log import EmbeddedLog
from onceflow.sinks import Files
from onceflow.sources import Log
from onceflow.state import JoinLast

EVENT = "id long, kind string, user string, restaurant string, ad string, at timestamp"
WINDOW, DELAY = timedelta(days=7), timedelta(hours=1)
EVENTS = 20_000


@job("attribution", every="200ms")
def attribution(flow: Flow) -> None:
    """Each order once, when no click can come any more that could claim it."""
    events = flow.read("events", Log("data/events", max_rows_per_epoch=4000))
    orders = flow.keyed(
        events,
        by=["user", "restaurant"],
        process=JoinLast("order", to=["click", "impression"], within=WINDOW, take=["ad"]),
        name="attribution",
        event_time="at",
        watermark="1 hour",
        late=Files("out/late"),
    )
    columns = ("id", "user", "restaurant", "matched", "matched_ad", "matched_at")
    flow.write("orders", orders.then(lambda df: df.select(*columns)), to=Files("out/orders"))


# ---------------------------------------------------------------- generator and truth


@dataclass(frozen=True)
class Event:
    id: int
    kind: str
    user: str
    restaurant: str
    ad: str | None
    at: datetime


def generate(seed: int, count: int) -> tuple[list[Event], set[int]]:
    """In the order in which they arrive; and the ids of those that come too late."""
    chance = random.Random(seed)
    begin, step = datetime(2026, 3, 2, tzinfo=UTC), timedelta(days=21) / count
    arriving, late = [], set()
    for id in range(count):
        kind = chance.choices(["impression", "click", "order"], [6, 3, 2])[0]
        user, restaurant = f"user {chance.randrange(60)}", f"restaurant {chance.randrange(5)}"
        ad = None if kind == "order" else f"ad {chance.randrange(40)}"
        at = begin + step * id
        delay = DELAY * chance.random() * 0.9
        if id > count // 20 and chance.random() < 0.003:
            delay = timedelta(days=2)
            late.add(id)
        arriving.append((at + delay, Event(id, kind, user, restaurant, ad, at)))
    arriving.sort(key=lambda pair: pair[0])
    return [event for _, event in arriving], late


def truth(events: Iterable[Event]) -> Counter[tuple[Any, ...]]:
    """The expected match of each order, as if all events had been there from the beginning."""
    seen: dict[tuple[str, str, str], list[tuple[datetime, str | None]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: event.at):
        seen[event.kind, event.user, event.restaurant].append((event.at, event.ad))
    found: Counter[tuple[Any, ...]] = Counter()
    for order in (event for event in events if event.kind == "order"):
        match: tuple[Any, ...] = (None, None, None)
        for kind in ("impression", "click"):  # a click is better
            candidates = seen[kind, order.user, order.restaurant]
            last = bisect_right(candidates, order.at, key=lambda pair: pair[0]) - 1
            if last >= 0 and candidates[last][0] >= order.at - WINDOW:
                at, ad = candidates[last]
                match = (kind, ad, at)
        found[order.id, order.user, order.restaurant, *match] += 1
    return found


# ---------------------------------------------------------------- two lives


def append(log: EmbeddedLog, events: list[Event]) -> None:
    for first in range(0, len(events), 1000):
        some = events[first : first + 1000]
        columns = zip(*(astuple(event) for event in some), strict=True)
        log.append(pa.table([pa.array(column) for column in columns], names=_names()))


def _names() -> list[str]:
    return [field.split()[0] for field in EVENT.split(", ")]


def live(folder: Path, *, kill_after: int | None = None) -> None:
    """Run the job to the end of the log, or `kill -9` all of it after so many epochs."""
    onceflow = [sys.executable, "-c", "from onceflow.cli import main; main()"]
    job = [str(Path(__file__).resolve()), "--home", "home", "--once"]
    run = subprocess.Popen(
        [*onceflow, "run", *job], cwd=folder, start_new_session=True, stdout=subprocess.DEVNULL
    )
    while kill_after is not None and run.poll() is None:
        if len(list(folder.glob("home/attribution/lineages/*/orders/commits/[0-9]*"))) > kill_after:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            return
        time.sleep(0.05)
    if run.wait() != 0:
        raise SystemExit(f"the job ended with {run.returncode}")


def read(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.rglob("*.parquet")):
        found += pq.ParquetFile(path).read().to_pylist()
    return found


def main() -> int:
    events, late = generate(seed=11, count=EVENTS)
    closing = max(event.at for event in events) + 3 * DELAY
    # A last event in every partition, so that the last orders are answered too.
    end = [Event(EVENTS + i, "closing", f"nobody {i}", "", None, closing) for i in range(1000)]
    with tempfile.TemporaryDirectory(prefix="onceflow-attribution-") as place:
        folder = Path(place)
        log = EmbeddedLog.create(folder / "data" / "events", EVENT, partitions=2, key=["user"])
        append(log, events[: EVENTS // 2])
        live(folder, kill_after=2)
        say(f"killed; {len(read(folder / 'out' / 'orders')):,} orders were published")
        append(log, [*events[EVENTS // 2 :], *end])
        live(folder)
        orders, too_late = read(folder / "out" / "orders"), read(folder / "out" / "late")
    found = Counter(tuple(order.values()) for order in orders)
    true = truth([event for event in events if event.id not in late])
    lost, more = (true - found).total(), (found - true).total()
    say(f"{len(orders):,} orders attributed: lost or wrong {lost}, too many {more}")
    say(f"{len(too_late):,} events came too late, {len(late):,} were sent so")
    same_late = {event["id"] for event in too_late} == late and len(too_late) == len(late)
    exact = not lost and not more and same_late
    say("all are exact" if exact else "NOT EXACT")
    return 0 if exact else 1


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    raise SystemExit(main())
