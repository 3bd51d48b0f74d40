"""The safe Spark profile, in one place.

Spark's defaults are not safe. The guarantees depend on `REQUIRED`: onceflow refuses a session that
lacks any of these settings, and names each. `FAST` halves the time of a small epoch on a local home
and changes no guarantee. `QUIET` reduces output and memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onceflow.errors import SessionRefused, SetupError
from onceflow.spark import packages as connector
from onceflow.spark.class_archive import java_options
from onceflow.spark.running_query import has_raw_files, is_classic, keep_no_checksums, keep_quiet
from onceflow.spark.versions import check_version

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_STREAM = "spark.sql.streaming."
_STATE = _STREAM + "stateStore."
_RETAIN = _STREAM + "minBatchesToRetain"

# setting -> (value, why)
REQUIRED: dict[str, tuple[str, str]] = {
    _STATE + "providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        "the state of every attempt has its own file names",
    ),
    _STATE + "rocksdb.changelogCheckpointing.enabled": (
        "true",
        "the state of an epoch is on disk when its action ends",
    ),
    _STATE + "checkpointFormatVersion": ("2", "format 1 reuses file names on retry"),
    _STREAM + "queryEvolution.enableSourceEvolution": (
        "true",
        "sources are matched by name, not by position",
    ),
    _STREAM + "offsetLog.formatVersion": ("2", "offsets are written by source name"),
    _STREAM + "noDataMicroBatches.enabled": ("true", "windows close without waiting for a row"),
    _STREAM + "unsupportedOperationCheck": (
        "true",
        "Spark refuses queries that it cannot run right",
    ),
    "spark.sql.adaptive.enabled": ("false", "the plan of an epoch does not change while it runs"),
    "spark.sql.session.timeZone": ("UTC", "times mean the same on every machine"),
    "spark.sql.files.ignoreCorruptFiles": ("false", "a damaged input file is not skipped"),
    "spark.sql.files.ignoreMissingFiles": ("false", "a missing input file is not skipped"),
}
_LEAST_RETAINED = 100
_GET_JAVA = (
    "install Java 17 or 21 (Debian and Ubuntu: apt-get install openjdk-17-jre-headless; "
    "macOS: brew install openjdk@17) and set JAVA_HOME if it is not on the PATH"
)

FAST = {
    _STREAM + "checkpointFileManagerClass": "org.apache.spark.sql.execution.streaming."
    "checkpointing.FileSystemBasedCheckpointFileManager",
    # As fast as Spark's default, and the files are smaller by at least a third.
    "spark.sql.parquet.compression.codec": "zstd",
}

# For tests: Spark maintains state within seconds instead of minutes and hours.
AGEING = {
    _STATE + "maintenanceInterval": "1s",
    _STATE + "minDeltasForSnapshot": "2",
}

QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Spark keeps the history for its page in the driver's memory.
    "spark.sql.ui.retainedExecutions": "10",
    "spark.ui.retainedJobs": "50",
    "spark.ui.retainedStages": "50",
    "spark.ui.retainedTasks": "1000",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # stop() must not wait forever for an epoch that hangs: a later driver fences it.
    _STREAM + "stopTimeout": "30s",
}


def profile() -> dict[str, str]:
    """All settings, for a builder of your own: `builder.config(map=onceflow.profile())`."""
    required = {name: value for name, (value, _) in REQUIRED.items()}
    return {**required, _RETAIN: str(_LEAST_RETAINED), **FAST, **QUIET}


def get_session(
    master: str | None = None,
    settings: dict[str, str] | None = None,
    *,
    log: Path | None = None,
) -> SparkSession:
    """The active session, if there is one; it must be safe. Otherwise a new one with the safe
    profile.

    `log`: the file to which the JVM of a new session writes instead of to standard error. A new
    session also gets the jars in the folder that ONCEFLOW_JARS names, if it is set.
    """
    from pyspark.sql import SparkSession

    # A session of another thread is not "active" in this one; building would change its settings.
    active = SparkSession.getActiveSession() or SparkSession._instantiatedSession
    if active is not None and active.sparkContext._jsc is not None:
        check_session(active)
        return active
    check_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    master = master or os.environ.get("SPARK_MASTER") or "local[*]"
    config: dict[str, Any] = {**profile(), "spark.app.name": "onceflow", "spark.master": master}
    if master.startswith("local"):
        cores = (
            str(os.cpu_count() or 1) if "*" in master else "".join(re.findall(r"\d+", master)[:1])
        )
        config["spark.sql.shuffle.partitions"] = cores or "1"
        config["spark.driver.host"] = config["spark.driver.bindAddress"] = "127.0.0.1"
    log4j = resources.files("onceflow.spark").joinpath("log4j2.properties")
    java = f"-Dlog4j2.configurationFile=file:{log4j} {java_options()}"
    config["spark.driver.extraJavaOptions"] = java.strip()
    config.update(settings or {})
    if named := connector.named_jars():
        given = config.get("spark.jars")
        config["spark.jars"] = ",".join([*map(str, named), *([given] if given else [])])
    with _standard_error_to(log):
        spark = SparkSession.builder.config(map=config).getOrCreate()
    keep_quiet(spark)
    keep_no_checksums(spark)
    check_session(spark)
    return spark


@contextlib.contextmanager
def _standard_error_to(log: Path | None) -> Iterator[None]:
    """Start the JVM in this block: it keeps the standard error that it was started with."""
    if log is None:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    ours = os.dup(2)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(ours, 2)
        os.close(ours)


def check_session(spark: Any) -> None:
    """Refuse a session whose settings would break a guarantee, and name each of them."""
    if not is_classic(spark):
        raise SessionRefused(
            "this is a Spark Connect session: onceflow cannot inspect its streaming queries",
            hint="use a classic session (spark.api.mode=classic)",
        )
    check_version(spark.version)
    wrong = [
        f"{name} is {spark.conf.get(name)!r}, must be {value!r}: {why}"
        for name, (value, why) in REQUIRED.items()
        if (spark.conf.get(name) or "").lower() != value.lower()
    ]
    retained = spark.conf.get(_RETAIN)
    if int(retained) < _LEAST_RETAINED:
        wrong.append(f"{_RETAIN} is {retained}, must be at least {_LEAST_RETAINED}: recovery")
    if has_raw_files(spark):
        wrong.append("spark.hadoop.fs.file.impl is a RawLocalFileSystem: state has no snapshots")
    if wrong:
        raise SessionRefused(
            "this Spark session would break guarantees:\n  - " + "\n  - ".join(wrong),
            hint="build the session with SparkSession.builder.config(map=onceflow.profile()), or "
            "set these with spark.conf.set(...) before the streaming DataFrame is made",
        )


def java_command() -> str:
    """The Java that Spark will use; `SetupError` if it is missing."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.path.exists(java):
        where = f": JAVA_HOME is {home}, which has no bin/java" if home else ""
        raise SetupError(f"Java is missing{where}", hint=_GET_JAVA)
    return java


def check_java() -> str:
    """The version of the Java that Spark will use; `SetupError` if it is missing or too old."""
    java, hint = java_command(), _GET_JAVA
    try:
        output = subprocess.run(
            [java, "-version"], check=False, capture_output=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{java} does not run: {error}", hint=hint) from error
    found = re.search(r'version "(\d+)(?:\.(\d+))?[^"]*"', output.stderr + output.stdout)
    if found is None:
        raise SetupError(f"{java} -version prints no version", hint=hint)
    major = int(found[2]) if found[1] == "1" else int(found[1])
    if major < 17:
        raise SetupError(f"Java {major} at {java} is too old: Spark 4 needs 17 or 21", hint=hint)
    return found[0].removeprefix("version ").strip('"')
