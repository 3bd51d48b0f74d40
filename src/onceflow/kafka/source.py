"""Kafka topics as a source, through Spark's own connector."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from onceflow.contract.sink import Sink
from onceflow.contract.source import Keep, Source, start_position
from onceflow.errors import JobError, OutOfRange, PlanChanged
from onceflow.kafka.client import Cluster, Offsets, Topic
from onceflow.kafka.errors import explain_connector
from onceflow.kafka.lag import ConsumerGroups
from onceflow.kafka.settings import check_source_settings, for_driver, for_spark
from onceflow.kafka.source_rows import Form

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

# If a range ends with the marker of a transaction, the connector needs one more fetch to pass it,
# which waits for a fetch of rows that do not exist yet: half a second a partition by default.
_FETCH_WAIT_MS = "10"
_ISOLATION = ("read_committed", "read_uncommitted")
_EARLIEST = -2  # in Spark's connector
_DEADLINE = 10.0  # seconds for one request of the driver
_SETTLE = 2.0  # seconds
_LAG = 1.0  # seconds


class Kafka(Source):
    """Every committed row of the topics is read exactly once, with its place.

    There is no order between partitions, and rows of one transaction may come in several epochs. If
    Kafka removed rows before the job read them, an error names them.

    `topics`: a name, a list of names, or a compiled pattern that whole names match; partitions and
    matching topics that are added later are read from their beginning. `value` and `key`: None for
    bytes, "string", or the schema of a JSON object. A value with a schema gives a column for each
    of its fields, else there is the column `value`; then come `_key`, `_topic`, `_partition`,
    `_offset`, `_timestamp` and `_headers`. A null value gives nulls; with a schema, `_tombstone`
    distinguishes it from an object without fields.

    `start`: "earliest", "latest", {topic: {partition: offset}} or, of one topic, {partition:
    offset}, or a time (a datetime, or text such as "2026-11-15T10:00:00Z": rows with that time or
    a later one). It counts for the first start only. A row that cannot be parsed stops the job
    (`on_bad="stop"`) or goes to the sink that `on_bad` names, as (topic, partition, offset,
    timestamp, key, value, reason), through a query of its own. `settings`: of the Kafka client.
    `group`: the consumer group to which the job commits published offsets, for tools that show
    lag; the job never reads them.
    """

    def __init__(
        self,
        topics: str | Iterable[str] | re.Pattern[str],
        *,
        servers: str | Iterable[str],
        value: str | StructType | None = None,
        key: str | StructType | None = None,
        start: str | datetime | Mapping[Any, Any] = "earliest",
        max_rows_per_epoch: int | None = None,
        isolation: str = "read_committed",
        on_bad: str | Sink = "stop",
        settings: Mapping[str, str] | None = None,
        group: str | None = None,
    ) -> None:
        self.topics = _topics(topics)
        self.servers = servers if isinstance(servers, str) else ",".join(servers)
        self.value = value
        self.key = key
        self.start = start_position(_by_topic(start, self.topics))
        self.max_rows_per_epoch = max_rows_per_epoch
        self.isolation = isolation
        self.on_bad = on_bad
        self.group = group
        self._settings = check_source_settings(settings or {})
        self._pin: dict[str, Any] | None = None
        self._keep: Keep = lambda _, facts: facts
        self._ids: dict[str, str] = {}  # of the topics that were seen
        self._reached: dict[str, dict[str, Offsets]] = {}  # group -> query -> offsets
        if isolation not in _ISOLATION:
            raise JobError(f"isolation={isolation!r}", hint=f"use one of {', '.join(_ISOLATION)}")
        if max_rows_per_epoch is not None and max_rows_per_epoch < 1:
            raise JobError(f"max_rows_per_epoch={max_rows_per_epoch} must be at least 1")
        if on_bad != "stop" and not isinstance(on_bad, Sink):
            raise JobError(f"on_bad={on_bad!r} is neither 'stop' nor a sink")
        if on_bad != "stop" and value is None and key is None:
            raise JobError(
                "key and value are bytes, which are not parsed: there are no rows to reject",
                hint='say how to parse them: Kafka(…, value="id long, name string"), or "string"',
            )
        settings_of_driver = for_driver(self._settings)
        self._cluster = Cluster(self.servers, settings_of_driver, _DEADLINE, reads=True)
        self._groups = ConsumerGroups(self._cluster)

    def __str__(self) -> str:
        wanted = self.topics
        names = wanted.pattern if isinstance(wanted, re.Pattern) else ",".join(wanted)
        return f"Kafka({names!r}, servers={self.servers!r})"

    def origin(self) -> dict[str, Any]:
        wanted = self.topics
        topics = [] if isinstance(wanted, re.Pattern) else wanted
        place = wanted.pattern if isinstance(wanted, re.Pattern) else ",".join(wanted)
        return {"kind": "kafka", "place": place, "topics": topics, "servers": self.servers}

    # .............................................................. topics

    def _declared_topics(self) -> dict[str, Topic]:
        """The named topics, all of which must exist; or all that match, if any."""
        found = self._present(self.topics)
        missing = (
            [n for n in self.topics if n not in found] if isinstance(self.topics, list) else []
        )
        if missing:
            raise JobError(
                f"{self.servers} has no topic {', '.join(missing)}",
                hint="create it, or correct the name",
            )
        return found

    def _present(self, wanted: list[str] | re.Pattern[str]) -> dict[str, Topic]:
        """The topics that exist among those that are named, or that match."""
        if isinstance(wanted, re.Pattern):
            return self._cluster.matching(wanted)
        found = self._cluster.topics(wanted)
        return {name: topic for name, topic in found.items() if topic is not None}

    # .............................................................. the first start

    def pin(self) -> dict[str, Any]:
        """The offsets at which a first start begins, and the topics that it found."""
        topics = self._declared_topics()
        first = self._first(topics)
        return {
            "topics": {
                name: {"id": topic.id, "next": [first[name, p] for p in range(topic.partitions)]}
                for name, topic in topics.items()
            }
        }

    def pinned(self, pin: dict[str, Any], keep: Keep) -> Kafka:
        """This source, beginning at the offsets of `pin`."""
        source = copy.copy(self)
        source._pin, source._keep, source._reached = pin, keep, {}
        source._ids = {name: topic["id"] for name, topic in pin["topics"].items()}
        return source

    def remember(self, offset: Any) -> None:
        """Keep the ids of topics that are new. This comes before rows are read: a topic that is
        created again in between is then not taken for the one that was read."""
        new = sorted(set(offset) - set(self._ids))
        if not new:
            return
        topics = self._present(new)
        self._refuse_others(topics)
        if missing := [name for name in new if name not in topics]:
            raise PlanChanged(
                f"topic {', '.join(missing)} was deleted before it was read",
                hint="onceflow opens the query again",
            )

    def _refuse_others(self, topics: Mapping[str, Topic]) -> None:
        """A topic keeps the id that it had when the job first saw it."""
        for name, topic in topics.items():
            if name not in self._ids:
                self._ids[name] = self._keep(name, {"id": topic.id})["id"]
            if topic.id != self._ids[name]:
                raise OutOfRange(
                    f"topic {name} was deleted and created again since this job first saw it",
                    hint="start the job under a new home with targets of its own",
                )

    def _first(self, topics: Mapping[str, Topic]) -> Offsets:
        places = [(name, p) for name, topic in topics.items() for p in range(topic.partitions)]
        if isinstance(self.start, dict) and "at" in self.start:
            return self._cluster.offsets_at(places, -(-self.start["at"] // 1000), self.isolation)
        ranges = self._cluster.ranges(places, self.isolation)
        if self.start == "latest":
            return {place: high for place, (_, high) in ranges.items()}
        first = {place: low for place, (low, _) in ranges.items()}
        asked = [] if self.start == "earliest" else self.start["offsets"]
        for topic, partition, offset in ((t, p, o) for t, of in asked for p, o in of.items()):
            if (topic, partition) not in ranges:
                raise JobError(f"{self}: topic {topic} has no partition {partition}")
            low, high = ranges[topic, partition]
            if not low <= offset <= high:
                raise OutOfRange(
                    f"topic {topic}, partition {partition} has no offset {offset}",
                    hint=f"it has {low} to {high}",
                )
            first[topic, partition] = offset
        return first

    # .............................................................. rows

    def stream(self, spark: SparkSession, name: str) -> DataFrame:
        """The rows as a stream. Without a job, `start` applies to a query without a checkpoint."""
        form = self._form()
        return form.good(form.judged(self._load(spark, name)), stop=self.on_bad == "stop")

    def rejected(self, spark: SparkSession, name: str) -> DataFrame:
        return self._form().bad(self._form().judged(self._load(spark, name)))

    def _form(self) -> Form:
        return Form.of(self.value, self.key, str(self))

    def _load(self, spark: SparkSession, name: str) -> DataFrame:
        options = {
            "startingOffsets": self._starting_offsets(),
            "failOnDataLoss": "true",
            "includeHeaders": "true",
            "kafka.fetch.max.wait.ms": _FETCH_WAIT_MS,
            **for_spark(self._settings),
            "kafka.bootstrap.servers": self.servers,
            "kafka.isolation.level": self.isolation,
        }
        if isinstance(self.topics, re.Pattern):
            options["subscribePattern"] = f"^(?:{self.topics.pattern})$"
        else:
            options["subscribe"] = ",".join(self.topics)
        if self.max_rows_per_epoch:
            options["maxOffsetsPerTrigger"] = str(self.max_rows_per_epoch)
        try:
            return spark.readStream.name(name).format("kafka").options(**options).load()
        except Exception as error:  # of py4j or Spark: the jars are missing or do not match
            raise explain_connector(str(error)) or error from None

    def _starting_offsets(self) -> str:
        """For every partition: the offset at which the first start began, or its beginning."""
        pinned = (self._pin or self.pin())["topics"]
        topics = self._declared_topics()
        if self._pin:
            self._refuse_others(topics)
        begin = {}
        for name, topic in topics.items():
            first = pinned[name]["next"] if name in pinned else []
            later = [_EARLIEST] * (topic.partitions - len(first))
            begin[name] = dict(enumerate([*first, *later]))
        return json.dumps(begin) if begin else "earliest"

    # .............................................................. later starts

    def check(self, offset: Any) -> bool:
        """Refuse to continue from `offset` if later rows are gone. The error names them."""
        stands = self._begins() if offset is None else _flat(offset)
        dropped = sorted({topic for topic, _ in stands if not self._wants(topic)})
        if dropped:
            raise JobError(
                f"{self} no longer names topic {', '.join(dropped)}, which the job has read",
                hint="name it again, or start the job under a new home with targets of its own",
            )
        for last in (False, False, True):  # a broker that has just become leader may lag
            lost, left = self._lost(stands, begun=offset is not None)
            if not lost:
                return True
            if not last:
                time.sleep(_LAG)
        raise OutOfRange(
            "rows that were not read yet are no longer in Kafka:\n  - " + "\n  - ".join(lost),
            hint="bring back the topic as it was, or continue without these rows: start the job "
            f"under a new home with targets of its own and start={left}",
        )

    def _begins(self) -> Offsets:
        """The offsets at which the first start began, as far as they are pinned."""
        pinned = self._pin["topics"] if self._pin else {}
        return {(name, p): o for name, of in pinned.items() for p, o in enumerate(of["next"])}

    def _wants(self, topic: str) -> bool:
        if isinstance(self.topics, re.Pattern):
            return self.topics.fullmatch(topic) is not None
        return topic in self.topics

    def _lost(self, stands: Offsets, *, begun: bool) -> tuple[list[str], dict[str, dict[int, int]]]:
        """The rows that are gone, and the offsets at which the rest begins."""
        topics = self._present(self.topics)
        places = [(name, p) for name, topic in topics.items() for p in range(topic.partitions)]
        ranges = self._cluster.ranges(places, self.isolation)
        low, high = ({place: r[i] for place, r in ranges.items()} for i in (0, 1))
        others = {n for n, topic in topics.items() if self._ids.get(n, topic.id) != topic.id}
        there = [place for place in places if place in stands and place[0] not in others]
        lost = [
            f"topic {name} was deleted and created again since this job first saw it"
            for name in sorted(others)
        ]
        lost += [
            f"topic {t}, partition {p}: offsets {stands[t, p]} to {low[t, p] - 1} are gone"
            for t, p in there
            if low[t, p] > stands[t, p]
        ]
        lost += [
            f"topic {t}, partition {p} ends at offset {high[t, p]}, but it was read up to "
            f"{stands[t, p]}: the topic was created again, or set back"
            for t, p in there
            if high[t, p] < stands[t, p]
        ]
        lost += [
            f"topic {t}, partition {p} is gone; it was read up to offset {o}"
            for (t, p), o in stands.items()
            if (t, p) not in ranges
        ]
        lost += [
            f"topic {t}, partition {p} was added later; its offsets 0 to {low[t, p] - 1} are gone"
            for t, p in places
            if begun and (t, p) not in stands and t not in others and low[t, p] > 0
        ]
        left: dict[str, dict[int, int]] = {}
        for topic, partition in places:
            left.setdefault(topic, {})[partition] = low[topic, partition]
        return lost, left

    def published(self, query: str, offset: Any) -> None:
        """Commit to the consumer group, for tools that show lag. Of several queries the slowest
        counts."""
        group = self.group or "onceflow." + query.replace("/", ".")
        queries = self._reached.setdefault(group, {})
        queries[query] = _flat(offset)
        places = {place for reached in queries.values() for place in reached}
        slowest = {p: min(q[p] for q in queries.values() if p in q) for p in places}
        if slowest:
            self._groups.commit(group, slowest)

    def settle(self) -> None:
        self._groups.settle(_SETTLE)


def _flat(offset: Any) -> Offsets:
    """An offset of Spark's connector: {topic: {partition: next}}."""
    return {(t, int(p)): int(o) for t, of in offset.items() for p, o in of.items()}


def _topics(topics: Any) -> list[str] | re.Pattern[str]:
    if isinstance(topics, re.Pattern):
        if topics.flags != re.compile("").flags or not isinstance(topics.pattern, str):
            raise JobError(
                f"the pattern {topics.pattern!r} has flags, which patterns of Kafka do not have",
                hint="write the flags into the pattern: (?i)orders-.*",
            )
        return topics
    names = [topics] if isinstance(topics, str) else list(topics)
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name):
            raise JobError(
                f"{name!r} is not the name of a topic",
                hint='use letters, digits, ".", "_" and "-", or a pattern: re.compile("orders-.*")',
            )
    if not names or len(set(names)) < len(names):
        raise JobError(f"topics={names!r}: name each topic once, and at least one")
    return names


def _by_topic(start: Any, topics: list[str] | re.Pattern[str]) -> Any:
    """Offsets of one topic need not name it."""
    if not isinstance(start, Mapping) or not start:
        return start
    if all(isinstance(of, Mapping) for of in start.values()):
        return {str(topic): dict(of) for topic, of in start.items()}
    if isinstance(topics, list) and len(topics) == 1:
        return {topics[0]: dict(start)}
    raise JobError(
        f"start={dict(start)!r} names no topic", hint="write start={topic: {partition: offset}}"
    )
