"""What Spark's Kafka connector raises, by our names."""

from __future__ import annotations

import re

from onceflow.errors import JobError, OnceflowError, OutOfRange, ServerSilent, SetupError

_JARS = (
    'export ONCEFLOW_JARS="$(python -m onceflow.spark.jars connector)", or give the session '
    "spark.jars.packages=org.apache.spark:spark-sql-kafka-0-10_2.13:<version of Spark>"
)
_ANEW = "start the job under a new home, with targets of its own"
_PLACES = r"(?:Set|HashSet|List)?\(([^)]*)\)"
_SILENT = (
    "org.apache.kafka.common.errors.TimeoutException",
    "org.apache.kafka.common.errors.DisconnectException",
    "org.apache.kafka.common.errors.NetworkException",
    "Cannot fetch record for offset",
    "No resolvable bootstrap urls",
)
_LINKAGE = r"java\.lang\.(?:NoClassDefFoundError|NoSuchMethodError|ClassNotFoundException|" \
           r"AbstractMethodError|IncompatibleClassChangeError|NoSuchFieldError)"  # fmt: skip


def explain_kafka(text: str) -> OnceflowError | None:
    """What an error of Spark says about Kafka; None if it is about something else."""
    return _connector(text) or _lost(text) or _denied(text) or _silent(text)


def _connector(text: str) -> SetupError | None:
    if re.search(r"Failed to find data source: kafka|DATA_SOURCE_NOT_FOUND.*kafka", text):
        return SetupError("this Spark session has no Kafka connector", hint=_JARS)
    kafka = r"kafka|commons[./]pool2"
    found = re.search(rf"{_LINKAGE}: (\S*(?:{kafka})\S*)", text, re.IGNORECASE)
    found = found or re.search(rf"{_LINKAGE}: ([^\n]+)\n\s+at org\.apache\.spark\.\S*kafka", text)
    if found:
        return SetupError(
            f"the Kafka connector's jars do not fit together or not this Spark: {found[1]} is "
            "missing",
            hint=_JARS,
        )
    return None


def _lost(text: str) -> OutOfRange | None:
    if found := re.search(
        r"Could not read records in offset \[(\d+), (\d+)\) for topic partition (\S+)-(\d+)", text
    ):
        first, end, topic, partition = found.groups()
        return OutOfRange(
            f"topic {topic}, partition {partition}: rows from offset {first} on (up to "
            f"{int(end) - 1} were asked for) are gone",
            hint=_ANEW,
        )
    if found := re.search(r"Partition (\S+)-(\d+) offset was changed from (\d+) to (\d+)", text):
        topic, partition, stood, ends = found.groups()
        return _set_back(topic, partition, int(stood), int(ends))
    if found := re.search(r"Added partition (\S+)-(\d+) starts from (\d+) instead of 0", text):
        topic, partition, first = found.groups()
        return OutOfRange(
            f"topic {topic}, partition {partition} came after the job was started, and its rows "
            f"at offsets 0 to {int(first) - 1} were gone before they were read",
            hint=_ANEW,
        )
    if found := re.search(
        rf"Partitions {_PLACES} have been deleted|initial offsets for partitions {_PLACES}", text
    ):
        return _gone(found[1] or found[2])
    if "UnknownTopicOrPartitionException" in text or "LOST_TOPIC_PARTITIONS" in text:
        return _gone("that the job reads")
    return None


def _set_back(topic: str, partition: object, stood: int, ends: int) -> OutOfRange:
    return OutOfRange(
        f"topic {topic}, partition {partition} ends at offset {ends}, but the job has read it up "
        f"to {stood}: the topic was deleted and created again, or set back",
        hint=_ANEW,
    )


def _gone(what: str) -> OutOfRange:
    return OutOfRange(
        f"Kafka's partitions {what} are gone: a topic was deleted, created again with fewer "
        "partitions, or dropped from the job",
        hint=f"bring them back, or {_ANEW}",
    )


def _denied(text: str) -> JobError | None:
    found = re.search(
        r"(?:Topic|Group|Cluster)AuthorizationException: ([^\n]*)|(Not authorized to [^\n]*)", text
    )
    if found:
        return JobError(
            f"Kafka denies access: {found[1] or found[2]}",
            hint="give this user the rights Describe and Read on the topic (kafka-acls --add "
            "--allow-principal User:… --operation Describe --operation Read --topic …)",
        )
    if found := re.search(r"SaslAuthenticationException: ([^\n]*)", text):
        return JobError(
            f"Kafka does not accept this user: {found[1]}",
            hint="mend sasl.username, sasl.password and security.protocol in settings=",
        )
    return None


def _silent(text: str) -> ServerSilent | None:
    for sign in _SILENT:
        if sign in text:
            line = next(line.strip() for line in text.splitlines() if sign in line)
            return ServerSilent(
                f"Kafka does not answer: {line[line.index(sign) :][:300]}",
                hint="start the broker, or mend the network; the job then goes on where it stood",
            )
    return None
