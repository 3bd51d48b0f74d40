"""Settings reach both clients of Kafka, and what Spark's connector raises is told by our names."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceflow.errors import JobError, OnceflowError, OutOfRange, ServerSilent, SetupError
from onceflow.kafka.errors import explain_connector
from onceflow.kafka.settings import for_driver, for_spark
from onceflow.sources import Kafka

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
    with pytest.raises(SetupError, match="SHOP_PASSWORD is not set"):
        for_spark(settings)


def test_certificates_by_the_names_of_the_java_client_reach_both_clients(tmp_path: Path) -> None:
    as_text = {
        "ssl.truststore.type": "PEM", "ssl.truststore.certificates": "CA",
        "ssl.keystore.type": "pem", "ssl.keystore.certificate.chain": "CERT",
        "ssl.keystore.key": "KEY", "ssl.key.password": "x",
    }  # fmt: skip
    by_librdkafka = {"ssl.ca.pem": "CA", "ssl.certificate.pem": "CERT", "ssl.key.pem": "KEY",
                     "ssl.key.password": "x"}  # fmt: skip
    assert for_driver(as_text) == by_librdkafka
    assert for_driver(by_librdkafka) == by_librdkafka
    java = {f"kafka.{name}": value for name, value in as_text.items()}
    assert for_spark(as_text) == java
    assert for_spark(by_librdkafka) == {**java, "kafka.ssl.keystore.type": "PEM"}
    files = {"ssl.truststore.type": "PEM", "ssl.truststore.location": "/ca",
             "ssl.keystore.type": "PEM", "ssl.keystore.location": "/both"}  # fmt: skip
    assert for_driver(files) == {
        "ssl.ca.location": "/ca",
        "ssl.certificate.location": "/both",
        "ssl.key.location": "/both",
    }
    store = {"ssl.keystore.location": "/store", "ssl.keystore.password": "x"}
    assert for_driver({"ssl.keystore.type": "PKCS12", **store}) == store


@pytest.mark.parametrize("store", ["truststore", "keystore"])
def test_a_store_that_only_java_can_read_is_refused_and_goes_beside_pem_files(
    tmp_path: Path, store: str
) -> None:
    java = {f"ssl.{store}.location": "/store", f"ssl.{store}.password": "x"}
    with pytest.raises(JobError, match=f"ssl.{store}.location is a JKS store") as refused:
        Kafka("orders", servers="127.0.0.1:1", settings=java)
    assert "PEM" in refused.value.hint
    (tmp_path / "pem").write_text("PEM")
    names = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
    pem = {name: str(tmp_path / "pem") for name in names}
    assert for_driver({**java, **pem}) == pem
    spark = for_spark({**java, **pem})
    assert spark[f"kafka.ssl.{store}.location"] == "/store"
    assert f"kafka.ssl.{store}.type" not in spark


def test_a_broker_whose_name_is_not_looked_at() -> None:
    name = "ssl.endpoint.identification.algorithm"
    for off in ("", "none"):
        assert for_driver({name: off}) == {name: "none"}
        assert for_spark({name: off}) == {f"kafka.{name}": ""}
    assert for_driver({name: "https"}) == {name: "https"}
    assert for_spark({name: "https"}) == {f"kafka.{name}": "https"}


def test_what_only_the_java_client_knows_is_kept_from_the_other() -> None:
    settings = {"fetch.max.bytes": "1", "client.id": "shop", "ssl.truststore.password": "x"}
    assert for_driver(settings) == {"client.id": "shop"}
    assert for_spark({"fetch.max.bytes": "1"}) == {"kafka.fetch.max.bytes": "1"}


# All that a consumer of Java, 3.9, knows of security and connections; without a value: any text.
JAVA = """
client.dns.lookup=use_all_dns_ips client.id client.rack
connections.max.idle.ms metadata.max.age.ms receive.buffer.bytes reconnect.backoff.max.ms
reconnect.backoff.ms request.timeout.ms retries retry.backoff.max.ms retry.backoff.ms
sasl.client.callback.handler.class sasl.jaas.config sasl.kerberos.kinit.cmd
sasl.kerberos.min.time.before.relogin sasl.kerberos.service.name sasl.kerberos.ticket.renew.jitter
sasl.kerberos.ticket.renew.window.factor sasl.login.callback.handler.class sasl.login.class
sasl.login.connect.timeout.ms sasl.login.read.timeout.ms sasl.login.refresh.buffer.seconds
sasl.login.refresh.min.period.seconds sasl.login.refresh.window.factor
sasl.login.refresh.window.jitter sasl.login.retry.backoff.max.ms sasl.login.retry.backoff.ms
sasl.mechanism=PLAIN sasl.oauthbearer.clock.skew.seconds sasl.oauthbearer.expected.audience
sasl.oauthbearer.expected.issuer sasl.oauthbearer.header.urlencode
sasl.oauthbearer.jwks.endpoint.refresh.ms sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms
sasl.oauthbearer.jwks.endpoint.retry.backoff.ms sasl.oauthbearer.jwks.endpoint.url
sasl.oauthbearer.scope.claim.name sasl.oauthbearer.sub.claim.name
sasl.oauthbearer.token.endpoint.url security.protocol=PLAINTEXT security.providers
send.buffer.bytes session.timeout.ms socket.connection.setup.timeout.max.ms
socket.connection.setup.timeout.ms=10000 ssl.cipher.suites ssl.enabled.protocols
ssl.endpoint.identification.algorithm= ssl.engine.factory.class ssl.key.password
ssl.keymanager.algorithm ssl.keystore.certificate.chain ssl.keystore.key ssl.keystore.password
ssl.keystore.type ssl.protocol ssl.provider ssl.secure.random.implementation
ssl.trustmanager.algorithm ssl.truststore.certificates ssl.truststore.password ssl.truststore.type
"""
LIBRDKAFKA = """
broker.address.family=v4 broker.address.ttl client.dns.lookup=use_all_dns_ips client.id
sasl.kerberos.keytab sasl.kerberos.principal sasl.mechanisms=PLAIN
sasl.oauthbearer.assertion.private.key.file sasl.oauthbearer.client.id
sasl.oauthbearer.client.secret sasl.oauthbearer.config sasl.oauthbearer.extensions
sasl.oauthbearer.grant.type=client_credentials sasl.oauthbearer.method=default
sasl.oauthbearer.scope sasl.password sasl.username ssl.ca.location ssl.ca.pem
ssl.certificate.location ssl.certificate.pem ssl.crl.location ssl.curves.list ssl.engine.id
ssl.engine.location ssl.key.location ssl.key.pem ssl.providers ssl.sigalgs.list
"""


@pytest.mark.parametrize("names", [JAVA, LIBRDKAFKA])
def test_the_client_of_the_driver_takes_all_that_it_is_given(names: str) -> None:
    from confluent_kafka import Consumer

    for setting in names.split():
        name, _, value = setting.partition("=")
        value = value if "=" in setting else "1"
        given = for_driver({name: value})
        Consumer({"group.id": "test", "log_level": 0, **given}).close()  # refuses what is unknown
        assert names == JAVA or given == {name: value}


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
    told = explain_connector(f"Job aborted due to stage failure: {text}")
    assert type(told) is kind
    assert says in told.message
    assert told.hint


def test_what_others_raise_is_not_about_kafka() -> None:
    assert explain_connector("java.lang.NoClassDefFoundError: org/apache/hadoop/X") is None
    assert explain_connector("java.util.concurrent.TimeoutException: Futures timed out") is None
