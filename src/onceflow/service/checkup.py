"""Check the machine and the leftovers of killed jobs, and say how to fix what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from onceflow.contract.extras import EXTRAS, install, missing
from onceflow.errors import OnceflowError
from onceflow.protocol.home import JobFolder, jobs
from onceflow.protocol.lease import Lease
from onceflow.service.number_format import age, number
from onceflow.spark import packages as connector
from onceflow.spark.session import check_java
from onceflow.spark.versions import check_version

_LITTLE_SPACE = 2 * 10**9
_NEEDED_JARS = ("spark-core_", "spark-sql_", "rocksdbjni", "hadoop-client-")
_OLD = 86_400  # seconds
_CLOCK_MAY_DIFFER = 1.0  # seconds


@dataclass(frozen=True)
class Finding:
    """The result of one check. `state`: ok, warning or wrong."""

    what: str
    state: str
    says: str
    fix: str = ""


def examine(home: str) -> Iterator[Finding]:
    yield _python()
    yield _java()
    yield _spark()
    yield _jars()
    yield _maven()
    yield _kafka()
    yield _extras()
    yield _disk("home", home)
    scratch = (os.environ.get("SPARK_LOCAL_DIRS") or tempfile.gettempdir()).split(",")
    for folder in scratch:
        yield _disk("spark.local.dir", folder)
    yield _clocks(home)
    for folder in scratch:
        yield _spark_leftovers(Path(folder))
    known = list(jobs(home))
    for job in known:
        yield _job(job)
    if not known:
        yield Finding("jobs", "ok", f"none under {home}")


# ---------------------------------------------------------------- what is installed


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    workers = os.environ.get("PYSPARK_PYTHON")
    if workers and workers != sys.executable:
        says = _first_line([workers, "-c", "import sys; print(*sys.version_info[:2], sep='.')"])
        if says != found.rpartition(".")[0]:
            return Finding(
                "python", "wrong", f"{found}, but workers get PYSPARK_PYTHON={workers} ({says})",
                f"unset PYSPARK_PYTHON, or set it to {sys.executable}",
            )  # fmt: skip
    return Finding("python", "ok", f"{found} at {sys.executable}")


def _java() -> Finding:
    try:
        return Finding("java", "ok", check_java())
    except OnceflowError as error:
        return Finding("java", "wrong", error.message, error.hint)


def _spark() -> Finding:
    fix = "pip install 'pyspark>=4.2,<4.4' 'pandas<3'"
    try:
        found = version("pyspark")
        check_version(found)
    except PackageNotFoundError:
        return Finding("spark", "wrong", "pyspark is not installed", fix)
    except OnceflowError as error:
        return Finding("spark", "wrong", error.message, error.hint)
    try:
        if int(version("pandas").partition(".")[0]) >= 3:
            says = f"pyspark {found}, with pandas {version('pandas')}, which it does not support"
            return Finding("spark", "warning", says, fix)
    except PackageNotFoundError:
        pass  # it is needed for pandas UDFs only
    return Finding("spark", "ok", f"pyspark {found}")


def _jars_of_spark() -> Path:
    spec = find_spec("pyspark")
    ours = Path((spec and spec.origin) or ".").parent
    return Path(os.environ.get("SPARK_HOME") or ours) / "jars"


def _jars() -> Finding:
    spec, folder = find_spec("pyspark"), _jars_of_spark()
    names = [path.name for path in folder.glob("*.jar")]
    fix = "unset SPARK_HOME" if "SPARK_HOME" in os.environ else "reinstall pyspark"
    missing = [jar for jar in _NEEDED_JARS if not any(name.startswith(jar) for name in names)]
    if missing:
        return Finding("jars", "wrong", f"{folder} lacks {', '.join(missing)}", fix)
    core = next(name for name in names if name.startswith("spark-core_"))
    found = re.search(r"-(\d[^-]*)\.jar$", core)
    if spec is not None and found is not None and found[1] != version("pyspark"):
        says = f"{folder} is of Spark {found[1]}, pyspark is {version('pyspark')}"
        return Finding("jars", "wrong", says, fix)
    return Finding("jars", "ok", f"{len(names)} jars in {folder}")


def _maven() -> Finding:
    maven = shutil.which("mvn")
    fix = "Debian and Ubuntu: apt-get install maven; macOS: brew install maven"
    if maven is None:
        return Finding("maven", "warning", "missing; only Kafka's jars need it", fix)
    says = _first_line([maven, "-v"])
    if not says.startswith("Apache Maven"):
        return Finding(
            "maven", "warning", f"{maven} does not run: {says}", f"repair Java, or {fix}"
        )
    return Finding("maven", "ok", says)


def _kafka() -> Finding:
    """Spark's Kafka connector: in the folder that is named, or among Spark's own jars."""
    what = "kafka connector"
    try:
        jars = connector.named_jars() or sorted(_jars_of_spark().glob("*.jar"))
        found = connector.find(jars, version("pyspark"))
    except PackageNotFoundError:
        return Finding(what, "warning", "pyspark is not installed", "pip install pyspark")
    except OnceflowError as error:
        return Finding(what, "wrong", error.message, error.hint)
    if found is None:
        return Finding(what, "warning", "missing; only Kafka sources need it", connector.GET)
    return Finding(what, "ok", f"of Spark {found.spark}, in {found.path.parent}")


def _extras() -> Finding:
    absent = [name for name in EXTRAS if missing(name)]
    says = ", ".join(name for name in EXTRAS if name not in absent) or "none"
    if absent:
        says += f"; for {', '.join(absent)}: {install(*absent)}"
    return Finding("extras", "ok", says)


def _first_line(command: list[str]) -> str:
    """The first line that a command prints, or why it prints nothing."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return re.sub(r"\x1b\[[\d;]*m", "", lines[0])[:200] if lines else f"exit code {done.returncode}"


# ---------------------------------------------------------------- disk and clocks


def _disk(what: str, folder: str) -> Finding:
    path = os.path.abspath(folder)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    if not os.path.isdir(path):
        return Finding(what, "wrong", f"{path} is not a folder", "name another one")
    if not os.access(path, os.W_OK | os.X_OK):
        return Finding(what, "wrong", f"{path} cannot be written to", "give yourself write access")
    free = shutil.disk_usage(path).free
    says = f"{free / 1e9:,.1f} GB free at {path}"
    if free < _LITTLE_SPACE:
        fix = "free some space: a full disk stops the job, and loses nothing"
        return Finding(what, "warning", says, fix)
    return Finding(what, "ok", says)


def _clocks(home: str) -> Finding:
    """Clocks that differ confuse people and event times, not the protocol, which compares none."""
    fix = "set the clocks by NTP; ages, and watermarks on processing time, are wrong until then"
    differs = _clock_of_disk(home)
    if abs(differs) > _CLOCK_MAY_DIFFER:
        says = f"the clock of the home's file system differs by {differs:,.1f} s"
        return Finding("clocks", "warning", says, fix)
    newest = max((_newest_decision(job) for job in jobs(home)), default=0.0)
    ahead = newest - time.time()
    if ahead > _CLOCK_MAY_DIFFER:
        says = f"the newest decision is {age(ahead)} in the future"
        return Finding("clocks", "warning", says, fix)
    return Finding("clocks", "ok", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def _clock_of_disk(home: str) -> float:
    """Seconds by which a file that is written now is ahead; 0 if it cannot be known."""
    try:
        with tempfile.TemporaryFile(dir=home) as file:
            file.write(b"\0")
            file.flush()
            return os.fstat(file.fileno()).st_mtime - time.time()
    except OSError:
        return 0.0


def _newest_decision(job: JobFolder) -> float:
    try:
        lasts = [query.epoch_log().read().last for query in job.queries()]
    except OnceflowError:
        return 0.0  # reported with the job
    return max((datetime.fromisoformat(d.at).timestamp() for d in lasts if d), default=0.0)


# ---------------------------------------------------------------- leftovers


def _job(job: JobFolder) -> Finding:
    what = f"job {job.name}"
    lease = Lease(job.folder / "lease", job.name)
    try:
        holder = lease.holder()
        running = holder is not None and lease.alive(holder)
        queries = job.queries()
        for query in queries:
            query.epoch_log().read()
    except OnceflowError as error:
        return Finding(what, "wrong", error.message, error.hint)
    if running:
        return Finding(what, "ok", f"led by {holder}")
    staged = sum(1 for query in queries for _ in query.staged.glob("*-*-*-*"))
    if staged:
        says = f"stopped, with {number(staged, 'epochs')} staged and not swept"
        fix = "start the job: it publishes what is decided and sweeps the rest"
        return Finding(what, "warning", says, fix)
    return Finding(what, "ok", "stopped, nothing left behind")


def _spark_leftovers(folder: Path) -> Finding:
    """A JVM that was killed leaves its temporary folders; one that ends removes them."""
    old = [
        path
        for pattern in ("spark-*-*-*-*-*", "blockmgr-*-*-*-*-*")
        for path in folder.glob(pattern)
        if time.time() - _modified(path) > _OLD
    ]
    if old:
        says = f"{len(old)} folders in {folder} are of JVMs that were killed over a day ago"
        fix = f"if no Spark that old runs: rm -r {folder}/spark-*-*-*-*-* {folder}/blockmgr-*"
        return Finding("leftovers", "warning", says, fix)
    return Finding("leftovers", "ok", f"no old folders of Spark in {folder}")


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # its JVM ends just now
        return time.time()
