"""The world of the application: its times, its ads and what they cost, its people, its records.

Nothing here reads a clock or a file. Money is in micro-units: 1,000,000 are one euro.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

SPEED = 60  # in the demo a second of the clock is a minute of ads
BEGIN = datetime(2026, 3, 2, 11, tzinfo=UTC)  # when the first event after the history is received
MAX_AGE = timedelta(minutes=2)  # what is received later than that after it happened is rejected
AHEAD = timedelta(seconds=10)  # clocks may differ by so much; what is further ahead is rejected
WINDOW = timedelta(days=7)  # a click or an impression can bring an order for so long
# No event that was accepted is later than this, whatever the epochs: it happened at most MAX_AGE
# before it was received, and the newest one until then at most AHEAD after.
DELAY = MAX_AGE + AHEAD
# Times of receipt may run backwards by so much within a partition. A line that is further behind
# than this waits in a log of late lines for somebody to look at it.
UNSTEADY = timedelta(hours=1)
REMEMBERED = 2 * DELAY  # how long an id is, on the clock of receipts: a copy comes within DELAY

REGIONS = ("eu", "us")
PARTITIONS = 2  # of every log and topic
KINDS = ("impression", "click", "order")
CURRENCY = "EUR"
MICROS = 1_000_000  # in a unit of the currency

# ---------------------------------------------------------------- what a stream's rows have

RAW = "value string, event_time timestamp"  # a line of JSON, and when it was received
RAW_KEY = ("value",)  # so that every append brings something to every partition
LINE = (
    "id string, kind string, at string, user string, restaurant string, ad string, `order` string"
)
EVENT = (
    "id string, kind string, at timestamp, received timestamp, user string, restaurant string, "
    "ad string, order_id string, region string, raw_partition int, raw_offset long"
)
COUNT = (
    "record_id string, region string, ad string, campaign string, minute timestamp, pane long, "
    "impressions long, clicks long"
)
REJECTED = "value string, received timestamp, reason string, raw_partition int, raw_offset long"
ATTRIBUTED = (
    "record_id string, region string, order_id string, user string, restaurant string, "
    "ordered_at timestamp, matched string, ad string, campaign string, matched_at timestamp, "
    "value_cents long, courier string, answer_id string"
)

# ---------------------------------------------------------------- why a line is rejected, in order

NOT_JSON = "not JSON"  # the text is not one JSON object
NULL_CHARACTER = "null character"  # in a field; databases do not take it
FIELD_MISSING = "field missing: "  # with the name of the first one that is missing, null or empty
FIELD_TOO_LONG = "field too long: "  # likewise; indexes and messages do not take any text
UNKNOWN_KIND = "unknown kind"
NOT_A_TIME = "not a time"
UNKNOWN_AD = "unknown ad"
TOO_OLD = "too old"
FROM_THE_FUTURE = "from the future"

REQUIRED = ("id", "kind", "at", "user", "restaurant")  # and `ad`, or for an order `order`
FREE = ("id", "user", "restaurant", "order")  # what they say is not known beforehand
LONGEST_FIELD = 200  # characters of those
LONGEST_LINE = 100_000  # characters of a rejected line that are kept

# ---------------------------------------------------------------- ads, campaigns, people, places


@dataclass(frozen=True)
class Ad:
    """An ad for a restaurant, with what a click on it costs."""

    name: str
    campaign: str
    restaurant: str
    price_micros: int


RESTAURANTS = tuple(f"restaurant-{number:02d}" for number in range(1, 61))
ADVERTISED = 30  # of the restaurants; the first ten of them have two ads

BUDGETS = {  # of each campaign; the first three are spent after some 60,000 events
    "breakfast": 300 * MICROS,
    "lunch": 500 * MICROS,
    "dinner": 600 * MICROS,
    "late-night": 2_000 * MICROS,
    "weekend": 2_500 * MICROS,
    "newcomers": 2_500 * MICROS,
    "vegetarian": 2_000 * MICROS,
    "free-delivery": 2_000 * MICROS,
}
CAMPAIGNS = tuple(BUDGETS)


def _ad(number: int) -> Ad:
    return Ad(
        name=f"ad-{number + 1:02d}",
        campaign=CAMPAIGNS[number % len(CAMPAIGNS)],
        restaurant=RESTAURANTS[number % ADVERTISED],
        price_micros=50_000 + (number * 337_129) % 850_001,
    )


ADS = {ad.name: ad for ad in map(_ad, range(40))}

_AWKWARD = ('Žofie "Zo"', "back\\slash", "李雷 😀", "tab\tand\nline", "' or 1=1 --", "O'Neil")
USERS = {  # each belongs to a region
    region: tuple(f"{region}-{number:03d}" for number in range(1, 161))
    + tuple(f"{region} {name}" for name in _AWKWARD)
    for region in REGIONS
}

# ---------------------------------------------------------------- records

NAMESPACE = uuid.UUID("6f6e6365-666c-6f77-8000-6164732e2e2e")


def count_id(region: str, ad: str, minute: datetime, pane: int) -> str:
    """The id of a pane, the same on every replay. `minute` is in UTC."""
    name = f"aggregation/{region}/{ad}/{minute:%Y-%m-%dT%H:%M:%SZ}/{pane}"
    return str(uuid.uuid5(NAMESPACE, name))


def order_name(region: str, order_id: str) -> str:
    """Regions number their orders each for itself."""
    return f"{region}/{order_id}"


def attribution_id(region: str, order_id: str) -> str:
    """The id of what is said of an order, the same on every replay."""
    return str(uuid.uuid5(NAMESPACE, f"attribution/{order_name(region, order_id)}"))
