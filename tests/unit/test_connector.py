"""Spark's Kafka connector: of this Spark and whole, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from onceflow.errors import SetupError
from onceflow.service import checkup
from onceflow.spark import packages as connector

WITH = ["spark-token-provider-kafka-0-10_2.13-4.0.0", "kafka-clients-3.9.2", "commons-pool2-2.13.1"]


def folder_with(folder: Path, *names: str) -> list[Path]:
    for name in names:
        (folder / f"{name}.jar").touch()
    return sorted(folder.glob("*.jar"))


@pytest.mark.parametrize(("made_for", "spark"), [("4.2.0", "4.2.1"), ("4.2.0", "4.3.0")])
def test_a_connector_for_this_spark_is_found(made_for: str, spark: str, tmp_path: Path) -> None:
    jars = folder_with(tmp_path, f"spark-sql-kafka-0-10_2.13-{made_for}", *WITH)
    found = connector.find(jars, spark)
    assert found is not None
    assert (found.path.parent, found.scala, found.spark) == (tmp_path, "2.13", made_for)


@pytest.mark.parametrize("wrong", ["2.12-3.5.1", "2.13-3.5.1", "2.12-4.2.0", "2.13-4.3.0"])
def test_a_connector_for_another_spark_is_refused(wrong: str, tmp_path: Path) -> None:
    jars = folder_with(tmp_path, f"spark-sql-kafka-0-10_{wrong}", *WITH)
    scala, _, made_for = wrong.partition("-")
    says = f"is for Spark {made_for} with Scala {scala}; this is Spark 4.2.1 with Scala 2.13"
    with pytest.raises(SetupError, match=says) as refused:
        connector.find(jars, "4.2.1")
    assert "python -m onceflow.spark.jars connector" in refused.value.hint


@pytest.mark.parametrize("missing", WITH)
def test_a_connector_without_its_company_is_refused(missing: str, tmp_path: Path) -> None:
    there = [name for name in WITH if name != missing]
    jars = folder_with(tmp_path, "spark-sql-kafka-0-10_2.13-4.2.0", *there)
    with pytest.raises(SetupError, match=rf"needs {missing[:10]}.*\*\.jar beside it"):
        connector.find(jars, "4.2.1")


def test_two_connectors_are_refused_and_none_is_no_mistake(tmp_path: Path) -> None:
    jars = folder_with(tmp_path, "mine-1", *WITH)
    assert connector.find(jars, "4.2.1") is None
    names = [f"spark-sql-kafka-0-10_2.13-4.2.{n}" for n in (0, 1)]
    with pytest.raises(SetupError, match=r"several.*4\.2\.0\.jar, .*4\.2\.1\.jar"):
        connector.find(folder_with(tmp_path, *names), "4.2.1")


def test_the_folder_of_the_environment_gives_its_jars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(connector.FOLDER, raising=False)
    assert connector.named_jars() == []
    monkeypatch.setenv(connector.FOLDER, str(tmp_path))
    with pytest.raises(SetupError, match="but there are no jars"):
        connector.named_jars()
    jars = folder_with(tmp_path, "spark-sql-kafka-0-10_2.13-4.2.0", *WITH)
    assert connector.named_jars() == jars


def test_the_doctor_says_what_connector_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(connector.FOLDER, raising=False)
    assert checkup._kafka().state == "warning"
    monkeypatch.setenv(connector.FOLDER, str(tmp_path))
    (old,) = folder_with(tmp_path, "spark-sql-kafka-0-10_2.12-3.5.1")
    assert checkup._kafka().state == "wrong"
    assert "is for Spark 3.5.1" in checkup._kafka().says
    old.unlink()
    folder_with(tmp_path, "spark-sql-kafka-0-10_2.13-4.2.0", *WITH)
    assert checkup._kafka().says == f"of Spark 4.2.0, in {tmp_path}"


def test_spark_can_get_the_connector_of_its_version_itself() -> None:
    from importlib.metadata import version

    wanted = f"org.apache.spark:spark-sql-kafka-0-10_2.13:{version('pyspark')}"
    assert connector.packages() == wanted
    assert connector.packages("4.3.0").endswith(":4.3.0")
