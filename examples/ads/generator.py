"""The input of the application: impressions, clicks and orders, with errors and repetitions.

All of it follows from a seed, without a clock or a file. The same seed always gives the same lines.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ads import malformed
from ads.world import (
    ADS,
    ADVERTISED,
    AHEAD,
    BEGIN,
    FROM_THE_FUTURE,
    MAX_AGE,
    REGIONS,
    RESTAURANTS,
    TOO_OLD,
    USERS,
    WINDOW,
)

if TYPE_CHECKING:
    import pyarrow as pa

_CLICKS, _ORDERS = 0.15, 0.05  # of the events; the others are impressions
_TROUBLE = 0.09  # of the events are not received as they should be:
_TROUBLES = {"late": 50, "early": 20, "malformed": 10, "odd": 2, TOO_OLD: 4, FROM_THE_FUTURE: 4}
_AGAIN = 0.03  # of the events are received once more
_CLICK_AFTER_ORDER = 0.05  # of the orders are received before their click
_BURST = 1 / 600  # of the seconds begin a burst of clicks by one user on one ad
_HISTORY, _HISTORY_EVENTS = WINDOW + timedelta(days=1), 3_000

_T = TypeVar("_T")
_SECOND, _MS, _MICROSECOND = 1_000_000, 1_000, timedelta(microseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_AGE, _AHEAD = MAX_AGE // _MICROSECOND, AHEAD // _MICROSECOND
_BEGIN = (BEGIN - _EPOCH) // _MICROSECOND


class Event(NamedTuple):
    """An event. It counts once, even if it is received again."""

    id: str
    kind: str
    at: datetime
    user: str
    restaurant: str
    ad: str | None
    order: str | None
    region: str


class Line(NamedTuple):
    """A line as it is received: an event, or a line that is rejected for a reason."""

    value: str
    received: datetime
    event: Event | None
    reason: str | None
    again: bool  # the event was received before


class _Person(NamedTuple):
    region: str
    name: str
    text: str  # as it stands in JSON


class _Place(NamedTuple):
    """A restaurant, and one of its ads if it has any."""

    restaurant: str
    ad: str | None
    nth: int  # of the ads of this restaurant


_PEOPLE = [
    _Person(region, name, json.dumps(name, ensure_ascii=number % 2 == 0))
    for region in REGIONS
    for number, name in enumerate(USERS[region])
]
_ADS = [_Place(ad.restaurant, ad.name, n // ADVERTISED) for n, ad in enumerate(ADS.values())]
# The more popular an ad is, the more often it stands here.
_POPULAR = [ad for n, ad in enumerate(_ADS) for _ in range(1 + 120 // (n + 3))]
_PLACES = [_Place(restaurant, None, 0) for restaurant in RESTAURANTS]

_Pending = tuple[int, str, Line]  # when it is received, where


class Generator:
    """The lines of both regions, second by second of ad time, without end.

    `per_minute` are the events in a minute of ad time, over both regions; repetitions
    and bursts come on top. `clean` leaves out all errors. Its memory does not grow.
    """

    def __init__(self, seed: int, *, per_minute: int = 2_000, clean: bool = False) -> None:
        self.seed, self.per_minute, self.clean = seed, per_minute, clean
        self.chunks = 0  # how many there have been
        self._random = random.Random(seed)
        self._mask = self._random.getrandbits(120)
        self._second = _BEGIN // _SECOND
        self._made = self._of_seconds = 0
        self._orders = dict.fromkeys(REGIONS, 0)  # each region numbers its own
        self._later: defaultdict[int, list[_Pending]] = defaultdict(list)  # by second
        self._clicked: deque[tuple[_Person, _Place]] = deque(maxlen=200)
        self._seen: deque[tuple[_Person, _Place]] = deque(maxlen=200)
        self._long_ago: list[tuple[_Person, _Place]] = []

    def chunk(self) -> dict[str, list[Line]]:
        """What is received in the next second, by region, in the order of receipt. The first chunk
        is a history of eight days, as sparse as possible."""
        self.chunks += 1
        if self.chunks == 1:
            return self._history()
        second, self._second = self._second, self._second + 1
        lines = self._later.pop(second, [])
        self._of_seconds += self.per_minute
        number, self._of_seconds = divmod(self._of_seconds, 60)
        start, chance = second * _SECOND, self._random.random
        for _ in range(number):
            self._receive(lines, start + int(chance() * 1000) * _MS)
        if not self.clean and chance() < _BURST:
            self._burst(start + _SECOND)
        return _by_region(lines)

    def closing(self) -> dict[str, list[Line]]:
        """An impression for each user an hour later: it closes everything that is open. The stream
        can continue after it, without the repetitions that were due before."""
        self._later.clear()
        self._second += 3600
        received = self._second * _SECOND
        self._second += 1
        lines: list[_Pending] = []
        for number, person in enumerate(_PEOPLE):
            at = received + 2 * number
            lines.append(self._line("impression", person, _ADS[number % len(_ADS)], at, at))
        return _by_region(lines)

    # ---------------------------------------------------------------- what happens

    def _history(self) -> dict[str, list[Line]]:
        step = _HISTORY // _MICROSECOND // _HISTORY_EVENTS // 2 * 2
        lines: list[_Pending] = []
        for back in range(_HISTORY_EVENTS, 0, -1):
            at = _BEGIN - back * step
            kind, person, place = self._happening()
            lines.append(self._line(kind, person, place, at, at))
            if kind == "click" and at < _BEGIN - 7 * 86_400 * _SECOND:
                self._long_ago.append((person, place))
        return _by_region(lines)

    def _happening(self) -> tuple[str, _Person, _Place]:
        chance = self._random.random
        what = chance()
        if what < _ORDERS:
            return ("order", *self._ordering())
        pair = _pick(_PEOPLE, chance()), _pick(_POPULAR, chance())
        if what < _ORDERS + _CLICKS:
            self._clicked.append(pair)
            return ("click", *pair)
        self._seen.append(pair)
        return ("impression", *pair)

    def _ordering(self) -> tuple[_Person, _Place]:
        """Mostly a user who clicked, or has seen an ad; or who clicked long ago; or any user."""
        chance = self._random.random
        why = chance()
        for share, pairs in ((0.5, self._clicked), (0.75, self._seen), (0.85, self._long_ago)):
            if why < share and pairs:
                return _pick(pairs, chance())
        return _pick(_PEOPLE, chance()), _pick(_PLACES, chance())

    def _burst(self, start: int) -> None:
        """Hundreds of clicks of one user on one ad within five seconds."""
        person, ad = _pick(_PEOPLE, self._random.random()), _pick(_ADS, self._random.random())
        for _ in range(self._random.randrange(150, 400)):
            at = start + self._random.randrange(5 * _SECOND) // 2 * 2
            self._later[at // _SECOND].append(self._line("click", person, ad, at, at))

    # ---------------------------------------------------------------- how it is received

    def _receive(self, lines: list[_Pending], received: int) -> None:
        """One event at that time, with its errors and repetitions."""
        kind, person, place = self._happening()
        chance = self._random.random
        if self.clean:
            at = received - int(chance() * 2 * _SECOND)
            lines.append(self._line(kind, person, place, at, received))
            return
        if chance() > _TROUBLE:
            at = received - int(chance() * 2 * _SECOND)
            line = self._line(kind, person, place, at, received)
        else:
            line = self._in_trouble(kind, person, place, received)
        lines.append(line)
        if chance() < _AGAIN:
            self._again(lines, line)
        if kind == "order" and chance() < _CLICK_AFTER_ORDER:
            self._click_after_order(line, person)

    def _in_trouble(self, kind: str, person: _Person, place: _Place, received: int) -> _Pending:
        chance, at = self._random, received
        trouble = chance.choices(list(_TROUBLES), list(_TROUBLES.values()))[0]
        if trouble == "late":
            at -= chance.randrange(_MAX_AGE - _MS)
        elif trouble == "early":
            at += chance.randrange(_AHEAD - _MS)
        elif trouble == TOO_OLD:
            at -= _MAX_AGE + _MS + chance.randrange(3600 * _SECOND)
        elif trouble == FROM_THE_FUTURE:
            at += _AHEAD + _MS + chance.randrange(3600 * _SECOND)
        pending = self._line(kind, person, place, at, received)
        line = pending[2]
        if trouble == "malformed":
            value, reason = malformed.broken(chance, line.value)
            line = line._replace(value=value, event=None, reason=reason)
        elif trouble == "odd":
            line = line._replace(value=malformed.odd(chance, line.value))
        return received, person.region, line

    def _again(self, lines: list[_Pending], first: _Pending) -> None:
        """The same line again: in the same second or later, even when it is too old."""
        received, region, line = first
        if line.event is None:
            return
        end_of_second = (received // _SECOND + 1) * _SECOND
        latest = _micros(line.event.at) + _MAX_AGE
        how = self._random.random()
        if how < 0.2:
            again = self._random.randrange(received, end_of_second)
        elif how < 0.9:
            again = self._random.randint(received, latest)
        else:
            again = latest + _MS + self._random.randrange(60 * _SECOND)
        again -= again % _MS
        if again > latest:
            copy = line._replace(received=_time(again), event=None, reason=TOO_OLD)
        else:
            copy = line._replace(received=_time(again), again=True)
        (lines if again < end_of_second else self._later[again // _SECOND]).append(
            (again, region, copy)
        )

    def _click_after_order(self, order: _Pending, person: _Person) -> None:
        """What led to the order happened before it, and is received after it."""
        received, _, line = order
        if line.event is None:
            return
        ads = [ad for ad in _ADS if ad.restaurant == line.event.restaurant]
        at = _micros(line.event.at) - self._random.randrange(_SECOND, 10 * _SECOND)
        after = received + self._random.randrange(_SECOND, 50 * _SECOND)
        if ads and after - at < _MAX_AGE:
            ad = _pick(ads, self._random.random())
            self._later[after // _SECOND].append(self._line("click", person, ad, at, after))

    def _line(self, kind: str, person: _Person, place: _Place, at: int, received: int) -> _Pending:
        """Two ads of one restaurant are never clicked in the same microsecond, so that there is
        always a last one."""
        at += place.nth - at % 2
        received -= received % _MS  # Kafka keeps milliseconds
        number = self._made = self._made + 1
        # An odd factor and a mask: scattered, and never the same twice.
        h = f"{(number * 0x9E3779B97F4A7C15F39CC0605CEDC9 ^ self._mask) & (1 << 120) - 1:030x}"
        id = f"{h[:8]}-{h[8:12]}-4{h[12:15]}-8{h[15:18]}-{h[18:]}"
        seconds, micros = divmod(at, _SECOND)
        ad, order = place.ad, None
        if kind == "order":
            self._orders[person.region] += 1
            ad, order = None, f"order-{self.seed}-{self._orders[person.region]}"
            tail = f'"ad":null,"order":"{order}"}}'
        else:
            tail = f'"ad":"{ad}"}}'
        value = (
            f'{{"id":"{id}","kind":"{kind}","at":"{_second_text(seconds)}.{micros:06d}Z",'
            f'"user":{person.text},"restaurant":"{place.restaurant}",{tail}'
        )
        when = _time(received)
        if received - at > _MAX_AGE:
            return received, person.region, Line(value, when, None, TOO_OLD, False)
        if at - received > _AHEAD:
            return received, person.region, Line(value, when, None, FROM_THE_FUTURE, False)
        event = Event(id, kind, _time(at), person.name, place.restaurant, ad, order, person.region)
        return received, person.region, Line(value, when, event, None, False)


def table(lines: Iterable[Line]) -> pa.Table:
    """Lines as a log with the default columns takes them."""
    import pyarrow as pa

    lines = list(lines)
    times = [_micros(line.received) for line in lines]
    return pa.table(
        {
            "value": pa.array([line.value for line in lines], pa.string()),
            "event_time": pa.array(times, pa.timestamp("us", "UTC")),
        }
    )


def _by_region(lines: list[_Pending]) -> dict[str, list[Line]]:
    lines.sort(key=itemgetter(0))
    found: dict[str, list[Line]] = {region: [] for region in REGIONS}
    for _, region, line in lines:
        found[region].append(line)
    return found


def _pick(some: Sequence[_T], chance: float) -> _T:
    return some[int(chance * len(some))]


def _micros(time: datetime) -> int:
    return (time - _EPOCH) // _MICROSECOND


def _time(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


@lru_cache(maxsize=4096)
def _second_text(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
