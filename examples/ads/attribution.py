"""Which ad sold it? Each order once, with the last click before it, else the last impression.

    onceflow run examples/ads/attribution.py

An order goes to the last click of the same user on the same restaurant within seven days, else to
the last impression, whichever of order and ad event comes first. It is emitted when no event that
could claim it can come any more. The order service at ADS_ORDERS tells the value of an order. Its
answers are staged (`answers.py`), so that every replay of an epoch uses the same ones.
"""

from __future__ import annotations

import os
from typing import Any

import pyarrow as pa

from ads.answers import Answers
from ads.places import Places, columns
from ads.world import ADS, ATTRIBUTED, DELAY, EVENT, REGIONS, WINDOW, attribution_id, order_name
from onceflow import Flow, job
from onceflow.state import JoinLast


@job("attribution", every="1 second")
def attribution(flow: Flow) -> None:
    places = Places.from_environment()
    answers = Answers(places.answers, os.environ.get("ADS_ORDERS", "http://127.0.0.1:8770"))
    orders = flow.keyed(
        places.read(flow, "events").select(columns(EVENT)),
        by=["region", "user", "restaurant"],
        process=Attribution(answers),
        event_time="at",
        watermark=f"{DELAY.total_seconds():.0f} seconds",
        # An event is late by what was received before it, whatever the epochs of aggregation.
        order=("region", "raw_partition", "raw_offset"),
        late=places.late("attribution"),
    )
    to = {region: places.sink("attributed", region) for region in REGIONS}
    flow.write("orders", orders, to=to, by="region")


class Attribution(JoinLast):
    """Each order once, with the event that it goes to and what the order service says of it."""

    def __init__(self, answers: Answers) -> None:
        super().__init__("order", to=["click", "impression"], within=WINDOW, take=["ad"])
        self._answers = answers

    def bind(self, keys: pa.Schema, rows: pa.Schema) -> None:
        super().bind(keys, rows)
        self.output = ATTRIBUTED

    def process(self, keys: pa.Table, rows: pa.Table) -> Any:
        orders, state = super().process(keys, rows)
        return self._told(orders), state

    def on_timer(self, keys: pa.Table) -> Any:
        orders, state = super().on_timer(keys)
        return self._told(orders), state

    def _told(self, orders: dict[str, pa.Array]) -> dict[str, Any]:
        ids = list(zip(orders["region"].to_pylist(), orders["order_id"].to_pylist(), strict=True))
        names, ads = [order_name(*id) for id in ids], orders["matched_ad"].to_pylist()
        found = self._answers.of(names)
        answers = [found[name] for name in names]
        return {
            "record_id": [attribution_id(*id) for id in ids],
            "region": orders["region"],
            "order_id": orders["order_id"],
            "user": orders["user"],
            "restaurant": orders["restaurant"],
            "ordered_at": orders["at"],
            "matched": orders["matched"],
            "ad": orders["matched_ad"],
            "campaign": [ad and ADS[ad].campaign for ad in ads],
            "matched_at": orders["matched_at"],
            "value_cents": [answer.value_cents for answer in answers],
            "courier": [answer.courier for answer in answers],
            "answer_id": [answer.answer_id for answer in answers],
        }
