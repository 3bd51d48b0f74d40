"""`onceflow doctor`"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import click

from onceflow.cli.output import home_option, json_option, show
from onceflow.epoch_log import Decision
from onceflow.errors import OnceflowError
from onceflow.home import jobs
from onceflow.runtime.lease import Lease
from onceflow.session import check_java
from onceflow.spark_inside import check_version

_LITTLE_SPACE = 2 * 10**9
_NEEDED_JARS = ("spark-sql_", "rocksdbjni", "hadoop-client-")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `state`: ok, warning or wrong."""

    what: str
    state: str
    says: str
    fix: str = ""


@click.command("doctor")
@home_option
@json_option
def command(home: str, as_json: bool) -> None:
    """Look at Java, Spark, Maven, jars, disk, clock and leftovers; say what mends each.

    Exit code 0: nothing is wrong (warnings may be there). 4: something is.
    """
    found = list(examine(home))
    show([asdict(f) for f in found], as_json=as_json, text=lambda _: _text(found))
    sys.exit(4 if any(f.state == "wrong" for f in found) else 0)


def examine(home: str) -> Iterator[Finding]:
    yield _python()
    yield _java()
    yield _spark()
    yield _jars()
    yield _maven()
    yield _disk("home", Path(home))
    yield _disk("spark.local.dir", Path(os.environ.get("SPARK_LOCAL_DIRS", "/tmp")))
    yield _clock(home)
    yield from _leftovers(home)


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    return Finding("python", "ok", f"{found} at {sys.executable}")


def _java() -> Finding:
    try:
        return Finding("java", "ok", check_java())
    except OnceflowError as error:
        return Finding("java", "wrong", error.message, error.hint)


def _spark() -> Finding:
    try:
        found = version("pyspark")
        check_version(found)
    except PackageNotFoundError:
        fix = "pip install 'pyspark>=4.2,<4.4'"
        return Finding("spark", "wrong", "pyspark is not installed", fix)
    except OnceflowError as error:
        return Finding("spark", "wrong", error.message, error.hint)
    return Finding("spark", "ok", f"pyspark {found}")


def _jars() -> Finding:
    spec = find_spec("pyspark")
    ours = Path((spec and spec.origin) or ".").parent
    folder = Path(os.environ.get("SPARK_HOME") or ours) / "jars"
    names = [path.name for path in folder.glob("*.jar")]
    missing = [jar for jar in _NEEDED_JARS if not any(name.startswith(jar) for name in names)]
    if missing:
        return Finding(
            "jars", "wrong", f"{folder} lacks {', '.join(missing)}",
            "pip install --force-reinstall pyspark, or unset SPARK_HOME",
        )  # fmt: skip
    return Finding("jars", "ok", f"{len(names)} jars in {folder}")


def _maven() -> Finding:
    maven = shutil.which("mvn")
    fix = "Debian and Ubuntu: apt-get install maven; macOS: brew install maven"
    if maven is None:
        return Finding("maven", "warning", "missing; only Kafka's jars need it", fix)
    said = subprocess.run([maven, "-v"], check=False, capture_output=True, text=True, timeout=60)
    if said.returncode:
        says = f"{maven} does not run: {said.stderr.strip()[:200]}"
        return Finding("maven", "warning", says, fix)
    return Finding("maven", "ok", said.stdout.splitlines()[0])


def _disk(what: str, folder: Path) -> Finding:
    while not folder.exists():
        folder = folder.absolute().parent
    free = shutil.disk_usage(folder).free
    says = f"{free / 1e9:,.1f} GB free at {folder}"
    if not os.access(folder, os.W_OK):
        says = f"{folder} cannot be written to"
        return Finding(what, "wrong", says, "give yourself write access")
    if free < _LITTLE_SPACE:
        fix = "make space: a full disk stops the job (and loses nothing)"
        return Finding(what, "warning", says, fix)
    return Finding(what, "ok", says)


def _clock(home: str) -> Finding:
    """A clock that went back confuses people, not the protocol: it compares no times."""
    newest = 0.0
    for folder in jobs(home):
        for query in folder.queries():
            last = _quiet(lambda query=query: query.epoch_log().read().last)  # type: ignore[misc]
            if last is not None:
                newest = max(newest, datetime.fromisoformat(last.at).timestamp())
    ahead = newest - time.time()
    if ahead > 1:
        return Finding(
            "clock", "warning", f"the newest decision is {ahead:,.0f} s in the future",
            "set the clock (NTP); watermarks on processing time may stand still until then",
        )  # fmt: skip
    return Finding("clock", "ok", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))


def _leftovers(home: str) -> Iterator[Finding]:
    count = 0
    for folder in jobs(home):
        count += 1
        lease = Lease(folder.folder / "lease", folder.name)
        try:
            holder = lease.holder()
            running = holder is not None and lease.alive(holder)
            for query in folder.queries():
                query.epoch_log().read()
        except OnceflowError as error:
            yield Finding(f"job {folder.name}", "wrong", error.message, error.hint)
            continue
        staged = [p for q in folder.queries() for p in q.staged.glob("*-*-*-*")]
        if running:
            yield Finding(f"job {folder.name}", "ok", f"led by {holder}")
        elif staged:
            yield Finding(
                f"job {folder.name}", "warning", f"stopped, with {len(staged)} staged epochs left",
                "start the job: it publishes what is decided and sweeps the rest",
            )  # fmt: skip
        else:
            yield Finding(f"job {folder.name}", "ok", "stopped, nothing left behind")
    if not count:
        yield Finding("jobs", "ok", f"none under {home}")


def _quiet(read: Callable[[], Decision | None]) -> Decision | None:
    try:
        return read()
    except OnceflowError:
        return None  # told by the leftovers


def _text(found: list[Finding]) -> str:
    colours = {"ok": "green", "warning": "yellow", "wrong": "red"}
    width = max(len(f.what) for f in found)
    lines = []
    for f in found:
        mark = click.style(f"{f.state:<7}", fg=colours[f.state])
        lines.append(f"{mark}  {f.what.ljust(width)}  {f.says}")
        if f.fix:
            lines.append(f"{'':<7}  {'':<{width}}  fix: {f.fix}")
    return "\n".join(lines)
