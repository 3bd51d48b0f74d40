"""Kafka's errors as ours: those of the client (`explain_client`) and of Spark's connector
(`explain_connector`)."""

from __future__ import annotations

import re
from typing import Any

from onceflow.errors import (
    JobError,
    OnceflowError,
    OutOfRange,
    PublishFailed,
    ServerSilent,
    SetupError,
    TargetAway,
    TargetError,
)

# Brokers do not answer, or too few are in sync.
_AWAY = (
    "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_MSG_TIMED_OUT",
    "REQUEST_TIMED_OUT", "NETWORK_EXCEPTION", "BROKER_NOT_AVAILABLE", "LEADER_NOT_AVAILABLE",
    "COORDINATOR_NOT_AVAILABLE", "COORDINATOR_LOAD_IN_PROGRESS", "NOT_ENOUGH_REPLICAS",
    "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
)  # fmt: skip
_READ_RIGHTS = (
    "give this user the rights Describe and Read on it (kafka-acls --add --allow-principal "
    "User:… --operation Describe --operation Read --topic …)"
)
_USER = "correct sasl.username, sasl.password and security.protocol in settings="

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


def explain_client(
    error: Any, doing: str, *, servers: str, reads: bool, topic: str, id: str, heard: str
) -> OnceflowError:
    """Our error for a KafkaError, with the fix.

    `reads`: a source made the request, not a sink. `heard`: the last error of a connection, which
    says more than that a request timed out.
    """
    said = heard or error.str()
    if "AUTHENTICATION" in error.name() or "authentication" in said.lower():
        kind = JobError if reads else TargetError
        return kind(f"Kafka at {servers} does not accept this user: {said}", hint=_USER)
    if reads:
        return _reading(error, doing, servers, topic, said)
    return _writing(error, f"Kafka at {servers}: cannot {doing}: {said}", topic, id)


def _reading(error: Any, doing: str, servers: str, topic: str, said: str) -> OnceflowError:
    if "AUTHORIZATION" in error.name():
        what = f"topic {topic}" if topic else "its topics"
        return JobError(f"{servers} denies access to {what} ({error.name()})", hint=_READ_RIGHTS)
    return ServerSilent(
        f"no answer from Kafka at {servers}, cannot {doing}: {said}",
        hint="start the broker, or correct servers= and the network; the job then continues",
    )


def _writing(error: Any, message: str, topic: str, id: str) -> OnceflowError:
    code, known = error.code(), type(error)
    rights = {
        known.TOPIC_AUTHORIZATION_FAILED: "--operation Describe --operation Read --operation "
        f"Write --operation Create --operation Alter --operation DescribeConfigs --topic {topic}",
        known.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "--operation Describe --operation Write "
        f"--transactional-id {id or 'onceflow-'} --resource-pattern-type prefixed",
        known.CLUSTER_AUTHORIZATION_FAILED: "--operation IdempotentWrite --operation Create "
        "--cluster",
    }
    if code in rights:
        hint = f"kafka-acls --add --allow-principal User:NAME {rights[code]}"
        return TargetError(message, hint=hint)
    hints = {
        known.INVALID_TRANSACTION_TIMEOUT: "transaction_timeout= of the sink must not be above "
        "transaction.max.timeout.ms of the broker: lower the one or raise the other",
        known.MSG_SIZE_TOO_LARGE: f"raise max.message.bytes of topic {topic} again",
        known.INVALID_REPLICATION_FACTOR: "create the topic yourself, with a "
        "replication factor that your cluster allows",
        known.UNKNOWN_TOPIC_OR_PART: "create the topic, or correct its name",
    }
    same = {
        known._UNKNOWN_TOPIC: known.UNKNOWN_TOPIC_OR_PART,
        known._UNKNOWN_PARTITION: known.UNKNOWN_TOPIC_OR_PART,
        known.RECORD_LIST_TOO_LARGE: known.MSG_SIZE_TOO_LARGE,
        known.POLICY_VIOLATION: known.INVALID_REPLICATION_FACTOR,
    }
    if hint := hints.get(same.get(code, code), ""):
        return TargetError(message, hint=hint)
    kind = TargetAway if code in [getattr(known, name) for name in _AWAY] else PublishFailed
    return kind(message, hint="check that the brokers can be reached; onceflow tries again")


# ---------------------------------------------------------------- Spark's connector


def explain_connector(text: str) -> OnceflowError | None:
    """Our error for the text of an error of Spark; None if it is not about Kafka."""
    return _connector(text) or _lost(text) or _denied(text) or _silent(text)


def _connector(text: str) -> SetupError | None:
    if re.search(r"Failed to find data source: kafka|DATA_SOURCE_NOT_FOUND.*kafka", text):
        return SetupError("this Spark session has no Kafka connector", hint=_JARS)
    kafka = r"kafka|commons[./]pool2"
    found = re.search(rf"{_LINKAGE}: (\S*(?:{kafka})\S*)", text, re.IGNORECASE)
    found = found or re.search(rf"{_LINKAGE}: ([^\n]+)\n\s+at org\.apache\.spark\.\S*kafka", text)
    if found:
        return SetupError(
            "the jars of the Kafka connector do not match each other or this version of Spark: "
            f"{found[1]} is missing",
            hint=_JARS,
        )
    return None


def _lost(text: str) -> OutOfRange | None:
    if found := re.search(
        r"Could not read records in offset \[(\d+), (\d+)\) for topic partition (\S+)-(\d+)", text
    ):
        first, end, topic, partition = found.groups()
        return OutOfRange(
            f"topic {topic}, partition {partition}: rows from offset {first} on are gone "
            f"(Spark asked for rows up to {int(end) - 1})",
            hint=_ANEW,
        )
    if found := re.search(r"Partition (\S+)-(\d+) offset was changed from (\d+) to (\d+)", text):
        topic, partition, stood, ends = found.groups()
        return _set_back(topic, partition, int(stood), int(ends))
    if found := re.search(r"Added partition (\S+)-(\d+) starts from (\d+) instead of 0", text):
        topic, partition, first = found.groups()
        return OutOfRange(
            f"topic {topic}, partition {partition} was added after the job started, and its rows "
            f"at offsets 0 to {int(first) - 1} were removed before the job read them",
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
            hint=_READ_RIGHTS,
        )
    if found := re.search(r"SaslAuthenticationException: ([^\n]*)", text):
        return JobError(
            f"Kafka does not accept this user: {found[1]}",
            hint=_USER,
        )
    return None


def _silent(text: str) -> ServerSilent | None:
    for sign in _SILENT:
        if sign in text:
            line = next(line.strip() for line in text.splitlines() if sign in line)
            return ServerSilent(
                f"Kafka does not answer: {line[line.index(sign) :][:300]}",
                hint="start the broker, or repair the network; the job then continues",
            )
    return None
