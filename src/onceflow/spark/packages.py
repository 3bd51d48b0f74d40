"""Spark's Kafka connector: it is not part of PySpark, and its version must be PySpark's.

If Maven's central repository can be reached, Spark downloads it: set `spark.jars.packages` to
`packages()`. Otherwise ONCEFLOW_JARS names a folder with its four jars; `python -m
onceflow.spark.jars connector` makes one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from onceflow.errors import SetupError
from onceflow.spark.versions import SUPPORTED

FOLDER = "ONCEFLOW_JARS"
SCALA = "2.13"
_NAME = "spark-sql-kafka-0-10"
_WITH = ("spark-token-provider-kafka-0-10_", "kafka-clients-", "commons-pool2-")
_CONNECTOR = re.compile(rf"{_NAME}_(\d+\.\d+)-(.+)\.jar")
GET = f'export {FOLDER}="$(python -m onceflow.spark.jars connector)"'


@dataclass(frozen=True)
class Connector:
    """A jar of the connector."""

    path: Path
    scala: str
    spark: str  # the version of Spark that it was built for


def packages(spark: str | None = None) -> str:
    """The value of `spark.jars.packages` with which Spark downloads the connector. `spark`: the
    version of Spark, by default that of the installed PySpark."""
    return f"org.apache.spark:{_NAME}_{SCALA}:{spark or version('pyspark')}"


def named_jars() -> list[Path]:
    """The jars in the folder that ONCEFLOW_JARS names; none if it is not set."""
    named = os.environ.get(FOLDER)
    if not named:
        return []
    found = sorted(Path(named).absolute().glob("*.jar"))
    if not found:
        raise SetupError(f"{FOLDER} names {named}, but there are no jars", hint=GET)
    find(found, version("pyspark"))
    return found


def find(jars: list[Path], spark: str) -> Connector | None:
    """The connector among these jars; `SetupError` if it is not one for this Spark."""
    found = [
        Connector(jar, *match.groups()) for jar in jars if (match := _CONNECTOR.fullmatch(jar.name))
    ]
    if not found:
        return None
    if len(found) > 1:
        several = ", ".join(c.path.name for c in found)
        raise SetupError(f"there are several Kafka connectors: {several}", hint="keep one of them")
    connector = found[0]
    made_for = _line(connector.spark)
    if connector.scala != SCALA or made_for not in SUPPORTED or made_for > _line(spark):
        raise SetupError(
            f"{connector.path} is for Spark {connector.spark} with Scala {connector.scala}; "
            f"this is Spark {spark} with Scala {SCALA}",
            hint=GET,
        )
    names = [jar.name for jar in jars]
    missing = [part for part in _WITH if not any(name.startswith(part) for name in names)]
    if missing:
        raise SetupError(
            f"{connector.path} needs {', '.join(f'{part}*.jar' for part in missing)} beside it",
            hint=GET,
        )
    return connector


def _line(spark: str) -> tuple[int, ...]:
    return tuple(int(re.sub(r"\D.*", "", part) or 0) for part in spark.split(".")[:2])
