"""The result for people: sums by campaign, beside the expected ones.

Sums may agree even if single numbers differ; the application's own check compares each number.
"""

from __future__ import annotations

from typing import Any

from onceflow.demo.application import Application


def result(app: Application, truth: Any) -> dict[str, Any]:
    """Clicks and money by campaign, and how many orders and rejected lines there are."""
    outputs, places = app.module("outputs"), app.places
    clicks_of = app.module("check").clicks_of
    serving = clicks_of(outputs.table(places, "ad_minutes"))
    warehouse = clicks_of(outputs.warehouse(places, "ad_minutes"))
    charged = {campaign.campaign: campaign.spent_micros for campaign in app.campaigns()}
    clicks, spend = truth.clicks_by_campaign(), truth.spend_micros_by_campaign()
    campaigns = [
        {
            "campaign": campaign,
            "clicks": clicks[campaign],
            "serving": serving[campaign],
            "warehouse": warehouse[campaign],
            "spend_micros": spend[campaign],
            "charged_micros": charged.get(campaign, 0),
        }
        for campaign in clicks
    ]
    orders = truth.attributions().values()
    found = outputs.table(places, "attributions")
    others = [
        ("orders", len(orders), len(found)),
        ("  brought by a click", *_matched("click", orders, found)),
        ("  brought by an impression", *_matched("impression", orders, found)),
        (
            "rejected lines",
            truth.rejected.total(),
            sum(len(outputs.stream(places, "rejected", region)) for region in app.regions),
        ),
    ]
    return {
        "currency": app.module("world").CURRENCY,
        "campaigns": campaigns,
        "others": [{"what": what, "truth": n, "found": m} for what, n, m in others],
    }


def _matched(kind: str, orders: Any, rows: list[dict[str, Any]]) -> tuple[int, int]:
    return (
        sum(order.matched == kind for order in orders),
        sum(row["matched"] == kind for row in rows),
    )
