"""Settings of Kafka clients. Spark's connector has the Java client, the driver has librdkafka: what
they call by different names is given by either name and reaches both. `env:NAME` is taken from the
environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from onceflow.errors import JobError

_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_OURS = {
    "bootstrap.servers": "servers=",
    "isolation.level": "isolation=",
    "group.id": "group=",
    "auto.offset.reset": "start=",
    "max.poll.records": "max_rows_per_epoch=",
}
_SHARED = ("security.", "sasl.", "ssl.", "client.", "broker.", "socket.connection.")
_JAVA_ONLY = ("sasl.jaas.config", "sasl.login.", "ssl.truststore.", "ssl.protocol", "client.dns.")


def refuse_settings(settings: Mapping[str, str]) -> None:
    for name in settings:
        if name.startswith("kafka."):
            raise JobError(f"settings: {name!r} is named without 'kafka.'", hint=f"{name[6:]!r}")
        if name in _OURS:
            raise JobError(f"settings: {name!r} is not for here", hint=f"use {_OURS[name]}")


def for_spark(settings: Mapping[str, str]) -> dict[str, str]:
    """As options of Spark's connector."""
    given = {name: _value(value) for name, value in settings.items()}
    user, password = given.pop("sasl.username", None), given.pop("sasl.password", None)
    if "sasl.mechanisms" in given:
        given["sasl.mechanism"] = given.pop("sasl.mechanisms")
    if user is not None and password is not None and "sasl.jaas.config" not in given:
        mechanism = given.get("sasl.mechanism", "PLAIN")
        if mechanism not in _MODULES:
            raise JobError(
                f"settings: sasl.mechanism {mechanism!r} does not go by name and password",
                hint=f"use one of {', '.join(_MODULES)}, or sasl.jaas.config",
            )
        said = f'username="{_quoted(user)}" password="{_quoted(password)}"'
        given["sasl.jaas.config"] = f"{_MODULES[mechanism]} required {said};"
    if "ssl.ca.location" in given:
        given.setdefault("ssl.truststore.type", "PEM")
        given["ssl.truststore.location"] = given.pop("ssl.ca.location")
    certificate, key = given.pop("ssl.certificate.location", ""), given.pop("ssl.key.location", "")
    if certificate and key:
        given["ssl.keystore.type"] = "PEM"
        given["ssl.keystore.certificate.chain"] = _text(certificate)
        given["ssl.keystore.key"] = _text(key)
    return {f"kafka.{name}": value for name, value in given.items()}


def for_driver(settings: Mapping[str, str]) -> dict[str, str]:
    """As settings of librdkafka: only what it takes to reach the broker."""
    given = {n: _value(v) for n, v in settings.items() if n.startswith(_SHARED)}
    jaas = given.get("sasl.jaas.config", "")
    for name in ("username", "password"):
        found = re.search(rf'{name}="((?:[^"\\]|\\.)*)"', jaas)
        if found:
            given.setdefault(f"sasl.{name}", re.sub(r"\\(.)", r"\1", found[1]))
    if given.get("ssl.truststore.type", "").upper() == "PEM":
        given.setdefault("ssl.ca.location", given.get("ssl.truststore.location", ""))
    return {n: v for n, v in given.items() if not n.startswith(_JAVA_ONLY)}


def _value(value: object) -> str:
    name = str(value).removeprefix("env:")
    if name == str(value):
        return name
    if name not in os.environ:
        raise JobError(f"settings: {value} is not set", hint=f"export {name}=…")
    return os.environ[name]


def _quoted(text: str) -> str:
    return re.sub(r'(["\\])', r"\\\1", text)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise JobError(f"settings: {path} cannot be read: {error.strerror}") from None
