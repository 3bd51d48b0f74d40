"""Settings of Kafka clients. Spark's connector uses the Java client, the driver uses librdkafka.

Where their names for a setting differ, users give either name, and both clients get it. `env:NAME`
stands for a variable of the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onceflow.contract.secrets import from_environment, names_variable
from onceflow.errors import JobError

_SECRET = re.compile(r"password|secret|token|jaas|\.pem$|oauthbearer\.config|sasl\.oauthbearer")
# The guarantee of a sink depends on these: users cannot change them.
_OF_THE_SINK = {
    "bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "isolation.level",
    "transaction.timeout.ms", "group.id", "enable.auto.commit", "enable.partition.eof",
    "partitioner", "delivery.report.only.error", "message.max.bytes", "logger", "error_cb",
    "max.in.flight.requests.per.connection", "allow.auto.create.topics",
}  # fmt: skip
# A source has arguments for these.
_OF_THE_SOURCE = {
    "bootstrap.servers": "servers=",
    "isolation.level": "isolation=",
    "group.id": "group=",
    "auto.offset.reset": "start=",
    "max.poll.records": "max_rows_per_epoch=",
}
_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
# With these librdkafka reaches a broker. All other names are for the Java client alone, even those
# that mean something else to librdkafka (`ssl.cipher.suites`, `sasl.kerberos.kinit.cmd`).
_DRIVER = {
    "security.protocol", "sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password",
    "sasl.kerberos.service.name", "sasl.kerberos.principal", "sasl.kerberos.keytab",
    "sasl.kerberos.min.time.before.relogin",
    "sasl.oauthbearer.method", "sasl.oauthbearer.config", "sasl.oauthbearer.scope",
    "sasl.oauthbearer.extensions", "sasl.oauthbearer.token.endpoint.url",
    "sasl.oauthbearer.grant.type", "sasl.oauthbearer.metadata.authentication.type",
    "ssl.ca.location", "ssl.ca.pem", "ssl.ca.certificate.stores", "ssl.crl.location",
    "ssl.certificate.location", "ssl.certificate.pem",
    "ssl.key.location", "ssl.key.pem", "ssl.key.password", "ssl.endpoint.identification.algorithm",
    "ssl.curves.list", "ssl.sigalgs.list", "ssl.providers", "ssl.engine.location", "ssl.engine.id",
    "client.id", "client.rack", "client.dns.lookup",
    "broker.address.family", "broker.address.ttl", "broker.version.fallback",
    "socket.connection.setup.timeout.ms",
}  # fmt: skip
_DRIVER_PARTS = ("sasl.oauthbearer.client.", "sasl.oauthbearer.assertion.")
_VERIFIES = "ssl.endpoint.identification.algorithm"


def check_sink_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    wrong = sorted(_OF_THE_SINK & set(settings))
    if wrong:
        raise JobError(
            f"settings of a Kafka sink cannot change {', '.join(wrong)}",
            hint="leave them out; you can choose servers=, timeout= and transaction_timeout=",
        )
    return dict(settings)


def check_source_settings(settings: Mapping[str, str]) -> dict[str, str]:
    for name in settings:
        if name.startswith("kafka."):
            raise JobError(f"settings: write {name!r} without 'kafka.'", hint=f"{name[6:]!r}")
        if name in _OF_THE_SOURCE:
            hint = f"use {_OF_THE_SOURCE[name]}"
            raise JobError(f"settings cannot have {name!r}", hint=hint)
    return dict(settings)


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that may be written to disk. `env:NAME` names a secret but is none."""
    return {
        name: value
        for name, value in settings.items()
        if not _SECRET.search(name) or names_variable(value)
    }


def with_environment(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, with the values of variables in place of `env:NAME`."""
    return {
        name: from_environment(value) if isinstance(value, str) else value
        for name, value in settings.items()
    }


def for_spark(settings: Mapping[str, str]) -> dict[str, str]:
    """As options of Spark's connector."""
    given = {name: str(value) for name, value in with_environment(settings).items()}
    user, password = given.pop("sasl.username", None), given.pop("sasl.password", None)
    if "sasl.mechanisms" in given:
        given["sasl.mechanism"] = given.pop("sasl.mechanisms")
    if user is not None and password is not None and "sasl.jaas.config" not in given:
        mechanism = given.get("sasl.mechanism", "PLAIN")
        if mechanism not in _MODULES:
            raise JobError(
                f"settings: sasl.mechanism {mechanism!r} does not use a name and a password",
                hint=f"use one of {', '.join(_MODULES)}, or sasl.jaas.config",
            )
        said = f'username="{_quoted(user)}" password="{_quoted(password)}"'
        given["sasl.jaas.config"] = f"{_MODULES[mechanism]} required {said};"
    if given.get(_VERIFIES) == "none":
        given[_VERIFIES] = ""
    _stores(given)
    return {f"kafka.{name}": value for name, value in given.items()}


def _stores(given: dict[str, str]) -> None:
    """Make stores of certificates that have librdkafka's names; keep stores that users gave."""
    file, text = given.pop("ssl.ca.location", ""), given.pop("ssl.ca.pem", "")
    if (file or text) and not _any(given, "ssl.truststore.location", "ssl.truststore.certificates"):
        given["ssl.truststore.type"] = "PEM"
        given["ssl.truststore.certificates" if text else "ssl.truststore.location"] = text or file
    parts = {}
    for part in ("certificate", "key"):
        file, text = given.pop(f"ssl.{part}.location", ""), given.pop(f"ssl.{part}.pem", "")
        parts[part] = text or (_text(file) if file else "")
    if all(parts.values()) and not _any(given, "ssl.keystore.location", "ssl.keystore.key"):
        given["ssl.keystore.type"] = "PEM"
        given["ssl.keystore.certificate.chain"] = parts["certificate"]
        given["ssl.keystore.key"] = parts["key"]


def for_driver(settings: Mapping[str, str]) -> dict[str, str]:
    """As settings of librdkafka: only what it takes to reach the broker."""
    given = {name: str(value) for name, value in with_environment(settings).items()}
    driver = {n: v for n, v in given.items() if n in _DRIVER or n.startswith(_DRIVER_PARTS)}
    jaas = given.get("sasl.jaas.config", "")
    for name in ("username", "password"):
        found = re.search(rf'{name}="((?:[^"\\]|\\.)*)"', jaas)
        if found:
            driver.setdefault(f"sasl.{name}", re.sub(r"\\(.)", r"\1", found[1]))
    if driver.get(_VERIFIES) == "":
        driver[_VERIFIES] = "none"
    if not _any(driver, "ssl.ca.location", "ssl.ca.pem"):
        driver |= _authorities(given)
    if not _any(driver, "ssl.certificate.location", "ssl.certificate.pem"):
        driver |= _certificate(given)
    return driver


def _authorities(given: Mapping[str, str]) -> dict[str, str]:
    """The trust store, under librdkafka's names."""
    if "ssl.truststore.certificates" in given:
        return {"ssl.ca.pem": given["ssl.truststore.certificates"]}
    if "ssl.truststore.location" not in given:
        return {}
    _kind(given, "truststore", "PEM")
    return {"ssl.ca.location": given["ssl.truststore.location"]}


def _certificate(given: Mapping[str, str]) -> dict[str, str]:
    """The key store, under librdkafka's names."""
    if "ssl.keystore.key" in given:
        chain = given.get("ssl.keystore.certificate.chain", "")
        return {"ssl.key.pem": given["ssl.keystore.key"], "ssl.certificate.pem": chain}
    if "ssl.keystore.location" not in given:
        return {}
    if _kind(given, "keystore", "PEM", "PKCS12") == "PEM":  # one file has certificate and key
        names = ("ssl.certificate.location", "ssl.key.location")
        return dict.fromkeys(names, given["ssl.keystore.location"])
    names = ("ssl.keystore.location", "ssl.keystore.password")
    return {name: given[name] for name in names if name in given}


def _kind(given: Mapping[str, str], store: str, *known: str) -> str:
    kind = given.get(f"ssl.{store}.type", "JKS").upper()  # as in the Java client
    if kind not in known:
        raise JobError(
            f"settings: ssl.{store}.location is a {kind} store, which the driver's client "
            "(librdkafka) cannot read",
            hint="name PEM files, instead of stores or beside them: ssl.ca.location, and for a "
            "certificate of your own ssl.certificate.location and ssl.key.location",
        )
    return kind


def _any(given: Mapping[str, str], *names: str) -> bool:
    return any(name in given for name in names)


def _quoted(text: str) -> str:
    return re.sub(r'(["\\])', r"\\\1", text)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise JobError(f"settings: {path} cannot be read: {error.strerror}") from None
