"""The reference application's input: the same for ever, and wrong in all the ways that it says."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from ads.feed import Feed, RawLogs
from ads.generator import Generator, Line, table
from ads.places import Places
from ads.stream import Stream
from ads.world import (
    ADS,
    AHEAD,
    BEGIN,
    FIELD_MISSING,
    FIELD_TOO_LONG,
    FREE,
    FROM_THE_FUTURE,
    KINDS,
    MAX_AGE,
    NOT_A_TIME,
    NOT_JSON,
    NULL_CHARACTER,
    REGIONS,
    REQUIRED,
    TOO_OLD,
    UNKNOWN_AD,
    UNKNOWN_KIND,
    USERS,
    WINDOW,
)

from onceflow.errors import JobError
from onceflow.log import EmbeddedLog


def lines_of(generator: Generator, chunks: int) -> dict[str, list[Line]]:
    found: dict[str, list[Line]] = {region: [] for region in REGIONS}
    for _ in range(chunks):
        for region, lines in generator.chunk().items():
            found[region] += lines
    return found


@pytest.fixture(scope="module")
def lines() -> dict[str, list[Line]]:
    return lines_of(Generator(8), 1500)


def every(lines: dict[str, list[Line]]) -> list[Line]:
    return [line for some in lines.values() for line in some]


# ---------------------------------------------------------------- the same for ever


def test_a_seed_gives_the_same_lines_again_and_another_one_others() -> None:
    assert lines_of(Generator(7), 60) == lines_of(Generator(7), 60)
    assert lines_of(Generator(7), 60) != lines_of(Generator(8), 60)


def test_lines_are_received_in_order_and_in_the_second_of_their_chunk() -> None:
    generator = Generator(3)
    history = generator.chunk()
    assert all(BEGIN - WINDOW - timedelta(days=2) < x.received < BEGIN for x in every(history))
    last = {region: history[region][-1].received for region in REGIONS}
    for number in range(200):
        second = BEGIN + timedelta(seconds=number)
        for region, some in generator.chunk().items():
            times = [line.received for line in some]
            assert times == sorted(times)
            assert all(second <= at < second + timedelta(seconds=1) for at in times)
            assert not times or times[0] >= last[region]
            last[region] = times[-1] if times else last[region]


def test_the_rate_is_what_was_asked_for() -> None:
    for per_minute in (60, 100, 2_000, 20_000):
        generator = Generator(1, per_minute=per_minute, clean=True)
        generator.chunk()
        assert len(every(lines_of(generator, 60))) == per_minute


def test_after_the_closing_lines_nothing_is_open_and_the_stream_can_go_on() -> None:
    generator = Generator(5)
    before = max(line.received for line in every(lines_of(generator, 200)))
    closing = every(generator.closing())
    assert {line.event.user for line in closing if line.event} == {
        user for users in USERS.values() for user in users
    }
    assert all(line.received - before > MAX_AGE + AHEAD for line in closing)
    assert all(x.received > closing[-1].received for x in every(lines_of(generator, 5)))


def test_what_it_remembers_does_not_grow() -> None:
    generator = Generator(1)
    generator.chunk()
    for _ in range(1000):
        generator.chunk()
    assert len(generator._later) <= (MAX_AGE * 2).total_seconds()


# ---------------------------------------------------------------- what is in it


def reason_of(line: Line) -> str | None:
    """Validates a line as the application's jobs do, without a look at what the generator says."""
    try:
        fields = json.loads(line.value)
    except ValueError:
        return NOT_JSON
    if not isinstance(fields, dict):
        return NOT_JSON
    if "\0" in "".join(str(fields.get(name)) for name in (*REQUIRED, "ad", "order")):
        return NULL_CHARACTER
    for name in REQUIRED:
        if fields.get(name) is None or (name in FREE and fields[name] == ""):
            return FIELD_MISSING + name
    for name in FREE:
        if len(fields.get(name) or "") > 200:
            return FIELD_TOO_LONG + name
    if fields["kind"] not in KINDS:
        return UNKNOWN_KIND
    needed = "order" if fields["kind"] == "order" else "ad"
    if fields.get(needed) is None or (needed == "order" and not fields["order"]):
        return FIELD_MISSING + needed
    try:
        at = datetime.fromisoformat(fields["at"])
    except ValueError:
        return NOT_A_TIME
    if needed == "ad" and fields["ad"] not in ADS:
        return UNKNOWN_AD
    if line.received - at > MAX_AGE:
        return TOO_OLD
    return FROM_THE_FUTURE if at - line.received > AHEAD else None


def test_what_a_line_says_of_itself_is_what_validation_finds(lines: dict[str, list[Line]]) -> None:
    for line in every(lines):
        assert line.reason == reason_of(line)
        assert (line.event is None) == (line.reason is not None)


def test_the_text_of_a_line_is_its_event(lines: dict[str, list[Line]]) -> None:
    for region, some in lines.items():
        for event, fields in ((x.event, json.loads(x.value)) for x in some if x.event):
            assert event.region == region
            assert datetime.fromisoformat(fields["at"]) == event.at
            names = ("id", "kind", "user", "restaurant", "ad")
            assert [fields[name] for name in names] == [getattr(event, name) for name in names]
            assert fields.get("order") == event.order
            assert event.ad is None or ADS[event.ad].restaurant == event.restaurant
            UUID(event.id)


def test_every_kind_of_trouble_is_there(lines: dict[str, list[Line]]) -> None:
    reasons = Counter((line.reason or "").partition(":")[0] for line in every(lines))
    named = {
        NOT_JSON,
        NULL_CHARACTER,
        UNKNOWN_KIND,
        NOT_A_TIME,
        UNKNOWN_AD,
        TOO_OLD,
        FROM_THE_FUTURE,
    }
    assert named | {"field missing", "field too long"} <= set(reasons)
    events = [line.event for line in every(lines) if line.event]
    assert {event.user for event in events} == {u for users in USERS.values() for u in users}
    kinds = Counter(event.kind for event in events)
    assert 0.7 < kinds["impression"] / len(events) < 0.85
    assert 0.03 < kinds["order"] / len(events) < 0.07


def test_a_line_that_comes_again_is_the_same_and_never_another_event(
    lines: dict[str, list[Line]],
) -> None:
    texts: dict[str, str] = {}
    ages = []
    for line in every(lines):
        if line.event is None:
            continue
        assert line.again == (line.event.id in texts)
        assert texts.setdefault(line.event.id, line.value) == line.value
        ages += [line.received - line.event.at] if line.again else []
    assert len(ages) > 500
    assert max(ages) > timedelta(seconds=100)
    late_copies = {line.value for line in every(lines) if line.reason == TOO_OLD}
    assert late_copies & set(texts.values())


def test_events_come_late_over_minutes_and_ahead_of_their_time(
    lines: dict[str, list[Line]],
) -> None:
    ages = [line.received - line.event.at for line in every(lines) if line.event and not line.again]
    assert timedelta(seconds=115) < max(ages) <= MAX_AGE
    assert -AHEAD <= min(ages) < -timedelta(seconds=8)


def test_a_burst_is_hundreds_of_clicks_of_one_user_on_one_ad(
    lines: dict[str, list[Line]],
) -> None:
    clicks: Counter[tuple[str, str, datetime]] = Counter()
    for line in every(lines):
        if line.event and line.event.kind == "click" and not line.again:
            minute = line.event.at.replace(second=0, microsecond=0)
            clicks[line.event.user, line.event.ad or "", minute] += 1
    assert clicks.most_common(1)[0][1] >= 100


def test_two_ads_of_a_restaurant_are_never_clicked_in_the_same_microsecond(
    lines: dict[str, list[Line]],
) -> None:
    ads: dict[tuple[str, datetime], str | None] = {}
    for line in every(lines):
        if line.event and line.event.kind != "order":
            place = line.event.restaurant, line.event.at
            assert ads.setdefault(place, line.event.ad) == line.event.ad


# ---------------------------------------------------------------- sending it


def test_a_table_is_what_a_log_takes(tmp_path: Path, lines: dict[str, list[Line]]) -> None:
    log = EmbeddedLog.create(tmp_path / "log")
    some = lines["eu"][:2000]
    log.append(table(some))
    log.append(table([]))
    rows = [row for batch in log.read(columns=["value", "event_time"]) for row in batch.to_pylist()]
    found = [(row["value"], row["event_time"]) for row in rows]
    assert found == [(line.value, line.received) for line in some]


def sent(places: Places) -> Counter[tuple[str, str, datetime]]:
    found: Counter[tuple[str, str, datetime]] = Counter()
    for region in REGIONS:
        for batch in EmbeddedLog(places.log("raw", region)).read(columns=["value", "event_time"]):
            found.update((region, row["value"], row["event_time"]) for row in batch.to_pylist())
    return found


@pytest.mark.usefixtures("no_fsync")
def test_a_feed_that_dies_anywhere_goes_on_and_sends_each_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places(tmp_path)
    places.create()
    asked_for = Stream(seed=4, per_minute=600)

    class DiedError(BaseException):
        pass

    def dies_between(raw: RawLogs, lines: dict[str, list[Line]], batch: int) -> None:
        """One region has it, the other has not."""
        whole(raw, {"eu": lines["eu"]}, batch)
        raise DiedError

    def dies_before(*_: object) -> None:
        raise DiedError

    whole = RawLogs.append
    feed = Feed(places, asked_for)
    feed.send(20)
    for dies in (dies_between, dies_before):
        monkeypatch.setattr(RawLogs, "append", dies)
        with pytest.raises(DiedError):
            feed.send(15)
        monkeypatch.setattr(RawLogs, "append", whole)
        feed = Feed(places, asked_for)
        feed.send(5)
    monkeypatch.setattr(RawLogs, "append", dies_between)
    with pytest.raises(DiedError):
        feed.close()
    monkeypatch.setattr(RawLogs, "append", whole)
    feed = Feed(places, asked_for)
    assert feed.close() == {}
    assert (feed.stream.chunks, feed.stream.closed) == (60, True)

    stream = Stream.load(tmp_path)
    assert stream is not None
    truth = Counter(
        (region, line.value, line.received)
        for chunk in stream.lines()
        for region, some in chunk.items()
        for line in some
    )
    assert sent(places) == truth
    for region in REGIONS:  # the closing lines are in every partition: nothing stays open
        log = EmbeddedLog(places.log("raw", region))
        newest: dict[int, datetime] = {}
        for batch in log.read(columns=["_partition", "event_time"]):
            newest |= {row["_partition"]: row["event_time"] for row in batch.to_pylist()}
        assert len(newest) == 2
        assert max(newest.values()) - min(newest.values()) < timedelta(seconds=1)


def test_another_stream_is_not_mixed_into_a_folder(tmp_path: Path) -> None:
    places = Places(tmp_path)
    places.create()
    Feed(places, Stream(seed=1, per_minute=60)).send(2)
    with pytest.raises(JobError, match="another stream: seed 1, 60 events"):
        Feed(places, Stream(seed=2, per_minute=60))
