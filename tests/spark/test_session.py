"""The safe Spark profile: made for a new session, demanded of one that is there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import onceflow
from onceflow.errors import SessionRefused, SetupError
from onceflow.spark.session import REQUIRED, check_java, check_session
from onceflow.spark.versions import check_version

RETAIN = "spark.sql.streaming.minBatchesToRetain"
WRONG = {
    name: "false" if value == "true" else "true" if value == "false" else other
    for (name, (value, _)), other in zip(
        REQUIRED.items(),
        ["org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider", "", "1",
         "", "1", "", "", "", "Europe/Amsterdam", "", ""],
        strict=True,
    )
} | {RETAIN: "99"}  # fmt: skip


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[Any]:
    """The settings of the session, as they were when the test is over."""
    before = {name: spark.conf.get(name) for name in WRONG}
    yield spark.conf
    for name, value in before.items():
        spark.conf.set(name, value)


# ---------------------------------------------------------------- a session that is there


def test_the_session_that_is_there_is_joined(spark: SparkSession) -> None:
    assert onceflow.get_session() is spark
    assert onceflow.get_session("local[1]", {"spark.app.name": "other"}) is spark


@pytest.mark.parametrize("name", WRONG)
def test_a_session_with_a_setting_that_breaks_a_guarantee_is_refused(
    name: str, settings: Any
) -> None:
    right = onceflow.profile()[name]
    settings.set(name, WRONG[name])
    with pytest.raises(SessionRefused) as refused:
        onceflow.get_session()
    said = str(refused.value)
    assert f"{name} is" in said
    assert WRONG[name] in said
    assert right in said
    assert said.count("\n  - ") == 1
    assert "config(map=onceflow.profile())" in said


def test_a_file_system_that_snapshots_of_state_cannot_be_written_through_is_refused(
    spark: SparkSession,
) -> None:
    hadoop, name = spark.sparkContext._jsc.hadoopConfiguration(), "fs.file.impl"
    before = hadoop.get(name)
    hadoop.set(name, "org.apache.hadoop.fs.RawLocalFileSystem")
    try:
        with pytest.raises(SessionRefused, match="RawLocalFileSystem"):
            check_session(spark)
    finally:
        hadoop.set(name, before) if before else hadoop.unset(name)


def test_all_that_is_wrong_is_named_at_once(settings: Any, spark: SparkSession) -> None:
    for name, value in WRONG.items():
        settings.set(name, value)
    with pytest.raises(SessionRefused) as refused:
        check_session(spark)
    assert all(f"{name} is" in str(refused.value) for name in WRONG)


def test_a_setting_whose_default_is_right_need_not_be_made(
    settings: Any, spark: SparkSession
) -> None:
    for name in ("spark.sql.files.ignoreCorruptFiles", RETAIN):
        settings.unset(name)
    check_session(spark)


def test_an_unsafe_session_is_refused_in_every_thread(settings: Any) -> None:
    settings.set("spark.sql.session.timeZone", "Europe/Amsterdam")
    said: list[object] = []

    def look() -> None:
        try:
            said.append(onceflow.get_session())
        except SessionRefused as error:
            said.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert isinstance(said[0], SessionRefused)
    assert settings.get("spark.sql.session.timeZone") == "Europe/Amsterdam"


def test_a_job_does_not_start_on_an_unsafe_session(settings: Any, tmp_path: Path) -> None:
    settings.set("spark.sql.adaptive.enabled", "true")
    job = onceflow.job("unsafe")(lambda flow: None)
    with pytest.raises(SessionRefused, match=r"spark\.sql\.adaptive\.enabled is 'true'"):
        onceflow.start(job, home=tmp_path / "home")
    assert not (tmp_path / "home").exists()


def test_a_new_session_has_the_profile_and_tells_times_in_utc(spark: SparkSession) -> None:
    profile = onceflow.profile()
    assert {name: spark.conf.get(name) for name in profile} == profile
    (row,) = spark.sql(
        "SELECT string(timestamp_seconds(0)) AS t, current_timezone() AS z"
    ).collect()
    assert tuple(row) == ("1970-01-01 00:00:00", "UTC")


def test_the_profile_is_a_copy(spark: SparkSession) -> None:
    onceflow.profile().clear()
    assert set(WRONG) <= set(onceflow.profile())


@pytest.mark.parametrize("version", ["4.2.0", "4.2.1", "4.3.0-SNAPSHOT", "4.2.2.dev1"])
def test_the_versions_whose_inside_is_known_are_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["3.5.7", "4.1.1", "4.0.0", "4.4.0", "5.0.0-preview1"])
def test_any_other_version_is_refused(version: str) -> None:
    with pytest.raises(SetupError, match=f"Spark {version} is not supported.*4.2, 4.3"):
        check_version(version)


# ---------------------------------------------------------------- Java


def fake_java(home: Path, *lines: str) -> None:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    java.chmod(0o755)


@pytest.fixture
def java_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    return tmp_path / "java"


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ('openjdk version "17.0.13" 2024-10-15', "17.0.13"),
        ('java version "21" 2023-09-19 LTS', "21"),
        ('openjdk version "17-ea" 2021-09-14', "17-ea"),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx="1.8"\nopenjdk version "21.0.5"', "21.0.5"),
    ],
)
def test_java_that_is_new_enough_is_taken(said: str, version: str, java_home: Path) -> None:
    fake_java(java_home, f"cat >&2 <<'END'\n{said}\nEND")
    assert check_java() == version


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["echo 'openjdk version \"11.0.2\" 2019-01-15' >&2"], "Java 11 at .* is too old"),
        (["echo 'java version \"1.8.0_392\"' >&2"], "Java 8 at .* is too old"),
        (["echo 'segmentation fault'", "exit 139"], "prints no version"),
        (["exit 0"], "prints no version"),
        (["printf '\\377\\376\\000' >&2"], "prints no version"),
    ],
    ids=["11", "8", "garbage", "silence", "bytes"],
)
def test_java_that_cannot_work_is_refused(lines: list[str], says: str, java_home: Path) -> None:
    fake_java(java_home, *lines)
    with pytest.raises(SetupError, match=says) as refused:
        check_java()
    assert "install Java 17 or 21" in refused.value.hint


def test_java_that_is_missing_or_does_not_run_is_refused(
    java_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError, match="Java is missing"):
        check_java()
    (java_home / "bin").mkdir(parents=True)
    (java_home / "bin" / "java").write_text("not a program")
    with pytest.raises(SetupError, match="does not run"):
        check_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(java_home))
    with pytest.raises(SetupError, match="Java is missing"):
        check_java()


# ---------------------------------------------------------------- a new session

NEW = """
import os, sys
from pathlib import Path
import onceflow
spark = onceflow.get_session("local[1]", {"spark.app.name": "mine"}, log=Path(sys.argv[1]))
print(spark.conf.get("spark.sql.shuffle.partitions"), spark.sparkContext.appName, flush=True)
spark._jvm.System.err.println("said by the JVM")
os.write(2, b"said by Python")
os._exit(0)
"""


def test_what_a_new_jvm_says_goes_to_the_log(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "spark.log"
    env = {**os.environ, "JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1"}
    command = [sys.executable, "-c", NEW, str(log)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert ended.stdout == "1 mine\n"
    assert ended.stderr == "said by Python"
    assert "said by the JVM" in log.read_text()


def test_the_session_starts_from_the_archive_of_classes(spark: SparkSession) -> None:
    archive = os.environ.get("ONCEFLOW_CLASS_ARCHIVE", "")
    if not os.path.isfile(archive):
        pytest.skip("scripts/test makes one when it runs everything")
    assert spark._jvm is not None
    beans = spark._jvm.java.lang.management.ManagementFactory
    assert f"-XX:SharedArchiveFile={archive}" in list(beans.getRuntimeMXBean().getInputArguments())
