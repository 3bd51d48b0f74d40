"""What perfect jobs of the reference application would have published, written in plain Python."""

from __future__ import annotations

import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from ads.answers import Answers
from ads.generator import Line
from ads.places import Places, columns
from ads.truth import Truth
from ads.world import ADS, ATTRIBUTED, COUNT, REGIONS, attribution_id, count_id, order_name

from onceflow.log import EmbeddedLog

Row = dict[str, Any]


def publish(places: Places, batches: list[dict[str, list[Line]]], answers: Answers) -> Truth:
    """Each batch as one epoch; then the attributions and the tables. Charges are not in it."""
    places.create()
    truth = Truth()
    for epoch, lines in enumerate(batches):
        known = {region: set(truth.events[region]) for region in REGIONS}
        truth.add(lines)
        for region in REGIONS:
            new = [e for id, e in truth.events[region].items() if id not in known[region]]
            append(places, "events", region, [_event(event) for event in new])
            rejected = [line for line in lines[region] if line.reason]
            append(places, "rejected", region, [
                {"value": x.value, "received": x.received, "reason": x.reason} for x in rejected
            ])  # fmt: skip
            append(places, "counts", region, _panes(region, epoch, new))
    orders = truth.attributions()
    said = answers.of(order_name(*order) for order in orders)
    for region in REGIONS:
        append(places, "attributed", region, [
            {"record_id": attribution_id(*id), **order._asdict(), **vars(said[order_name(*id)])}
            for id, order in orders.items() if order.region == region
        ])  # fmt: skip
    load(places)
    return truth


def append(places: Places, stream: str, region: str, rows: list[Row]) -> None:
    log = EmbeddedLog(places.log(stream, region))
    if rows:
        full = [{name: row.get(name) for name in log.schema.names} for row in rows]
        log.append(pa.Table.from_pylist(full, log.schema))


def rows_of(places: Places, stream: str) -> list[Row]:
    logs = [EmbeddedLog(places.log(stream, region)) for region in REGIONS]
    return [row for log in logs for batch in log.read() for row in batch.to_pylist()]


def load(places: Places) -> None:
    """Both tables, from the streams."""
    for stream, table, schema in (
        ("counts", "ad_minutes", COUNT),
        ("attributed", "attributions", ATTRIBUTED),
    ):
        rows = [{n: row[n] for n in columns(schema)} for row in rows_of(places, stream)]
        time = "minute" if stream == "counts" else "ordered_at"
        _to_sqlite(places.serving_file, table, rows)
        found = pa.Table.from_pylist([{**row, "day": f"{row[time]:%Y-%m-%d}"} for row in rows])
        by = ds.partitioning(
            pa.schema([("region", pa.string()), ("day", pa.string())]), flavor="hive"
        )
        ds.write_dataset(found, places.warehouse_folder(table), format="parquet", partitioning=by)


def _to_sqlite(path: Path, table: str, rows: list[Row]) -> None:
    names = ", ".join(f'"{name}"' for name in rows[0])
    marks = ", ".join("?" * len(rows[0]))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(f"CREATE TABLE {table} ({names})")
        db.executemany(
            f"INSERT INTO {table} VALUES ({marks})",
            [[str(v)[:26] if hasattr(v, "year") else v for v in row.values()] for row in rows],
        )


def _event(event: Any) -> Row:
    return {**event._asdict(), "order_id": event.order, "received": event.at}


def _panes(region: str, epoch: int, events: list[Any]) -> list[Row]:
    counts: Counter[Any] = Counter()
    for event in events:
        if event.ad is not None:
            counts[event.ad, event.at.replace(second=0, microsecond=0), event.kind] += 1
    return [
        {
            "record_id": count_id(region, ad, minute, epoch),
            "region": region,
            "ad": ad,
            "campaign": ADS[ad].campaign,
            "minute": minute,
            "pane": epoch,
            "impressions": counts[ad, minute, "impression"],
            "clicks": counts[ad, minute, "click"],
        }
        for ad, minute in sorted({cell[:2] for cell in counts})
    ]
