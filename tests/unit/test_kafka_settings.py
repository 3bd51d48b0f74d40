"""Settings reach both clients of Kafka, and what Spark's connector raises is told by our names."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceflow.errors import JobError, OnceflowError, OutOfRange, ServerSilent, SetupError
from onceflow.sources.kafka_errors import explain_kafka
from onceflow.sources.kafka_settings import for_driver, for_spark

BY_NAME = {"security.protocol": "SASL_SSL", "sasl.mechanism": "PLAIN",
           "sasl.username": "shop", "sasl.password": 'a"b\\c'}  # fmt: skip


def test_name_and_password_reach_both_clients_whichever_way_they_are_given() -> None:
    java = for_spark(BY_NAME)
    assert java == {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule "
        'required username="shop" password="a\\"b\\\\c";',
    }
    given = {name.removeprefix("kafka."): value for name, value in java.items()}
    assert for_driver(given) == BY_NAME
    assert for_spark(given) == java
    assert for_driver(BY_NAME) == BY_NAME


def test_certificates_reach_both_clients(tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("CERT")
    (tmp_path / "key").write_text("KEY")
    settings = {
        "ssl.ca.location": "/ca.pem",
        "ssl.certificate.location": str(tmp_path / "cert"),
        "ssl.key.location": str(tmp_path / "key"),
    }
    assert for_driver(settings) == settings
    assert for_spark(settings) == {
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": "/ca.pem",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.certificate.chain": "CERT",
        "kafka.ssl.keystore.key": "KEY",
    }
    with pytest.raises(JobError, match="cannot be read"):
        for_spark({**settings, "ssl.key.location": str(tmp_path / "none")})


def test_a_secret_may_stay_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", BY_NAME["sasl.password"])
    settings = {**BY_NAME, "sasl.password": "env:SHOP_PASSWORD"}
    assert for_spark(settings) == for_spark(BY_NAME)
    assert for_driver(settings) == BY_NAME
    monkeypatch.delenv("SHOP_PASSWORD")
    with pytest.raises(JobError, match="env:SHOP_PASSWORD is not set"):
        for_spark(settings)


def test_what_only_the_java_client_knows_is_kept_from_the_other() -> None:
    settings = {"fetch.max.bytes": "1", "client.id": "shop", "ssl.truststore.password": "x"}
    assert for_driver(settings) == {"client.id": "shop"}
    assert for_spark({"fetch.max.bytes": "1"}) == {"kafka.fetch.max.bytes": "1"}


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("Partition a-b-3 offset was changed from 9 to 4.", OutOfRange,
         "topic a-b, partition 3 ends at offset 4, but the job has read it up to 9"),
        ("Partitions Set(a-0, a-1) have been deleted.", OutOfRange, "a-0, a-1 are gone"),
        ("Added partition a-2 starts from 5 instead of 0.", OutOfRange, "offsets 0 to 4"),
        ("Could not read records in offset [3, 9) for topic partition a-0\nwith", OutOfRange,
         "topic a, partition 0: rows from offset 3 on"),
        ("org.apache.kafka.common.errors.TopicAuthorizationException: Not authorized to access "
         "topics: [a]", JobError, "Not authorized to access topics: [a]"),
        ("org.apache.kafka.common.errors.SaslAuthenticationException: bad", JobError, "bad"),
        ("Caused by: org.apache.kafka.common.errors.TimeoutException: Timed out waiting for a "
         "node assignment. Call: describeTopics", ServerSilent, "node assignment"),
        ("java.lang.NoClassDefFoundError: org/apache/commons/pool2/impl/X", SetupError, "pool2"),
    ],
)  # fmt: skip
def test_what_the_connector_raises_is_told_by_our_names(
    text: str, kind: type[OnceflowError], says: str
) -> None:
    told = explain_kafka(f"Job aborted due to stage failure: {text}")
    assert type(told) is kind
    assert says in told.message
    assert told.hint


def test_what_others_raise_is_not_about_kafka() -> None:
    assert explain_kafka("java.lang.NoClassDefFoundError: org/apache/hadoop/X") is None
    assert explain_kafka("java.util.concurrent.TimeoutException: Futures timed out") is None
