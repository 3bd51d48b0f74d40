"""Jars that are neither in PySpark nor in a wheel: Maven downloads them once into a folder.

`python -m onceflow.spark.jars connector` prints the folder of Spark's Kafka connector, and
downloads it first if it is missing; `broker` is Kafka itself, for tests and examples. The POM of
that name beside this file lists the jars. A folder is complete or does not exist.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import zlib
from pathlib import Path

from onceflow.errors import SetupError

NAMES = ("connector", "broker")
_HERE = Path(__file__).parent
_TIMEOUT = 900.0  # seconds


def fetch(name: str) -> Path:
    """The folder with these jars. If it does not exist, this needs Maven and a network."""
    folder = folder_of(name)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as unfinished:
        jars = Path(unfinished) / "jars"
        _run_maven(name, folder, Path(unfinished))
        try:
            jars.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


def folder_of(name: str) -> Path:
    """The path of the folder with the jars. Another POM has another folder."""
    return cache() / f"{name}-{zlib.crc32(pom(name).read_bytes()):08x}"


def pom(name: str) -> Path:
    return _HERE / f"{name}.xml"


def cache() -> Path:
    """`.cache/jars` of a clone; `onceflow/jars` in the user's cache for an installed package."""
    clone = _HERE.parents[3]
    if (clone / "scripts" / "bootstrap").is_file():
        return clone / ".cache" / "jars"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onceflow" / "jars"


def _run_maven(name: str, folder: Path, unfinished: Path) -> None:
    by_hand = f"mvn -B -q -f {pom(name)} dependency:copy-dependencies -DoutputDirectory={folder}"
    maven = shutil.which("mvn")
    if maven is None:
        raise SetupError(
            f"Maven (mvn) is missing; it downloads the jars of the Kafka {name}",
            hint="install it (Debian and Ubuntu: apt-get install maven; macOS: brew install "
            f"maven), or run this on a machine that has it: {by_hand}",
        )
    shutil.copy(pom(name), unfinished / "pom.xml")  # Maven may write beside it
    to = f"-DoutputDirectory={unfinished / 'jars'}"
    command = [maven, "-B", "-q", "-f", "pom.xml", "dependency:copy-dependencies", to]
    try:
        done = subprocess.run(
            command, cwd=unfinished, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=_TIMEOUT,
        )  # fmt: skip
        failed, output = done.returncode != 0, done.stdout
    except subprocess.TimeoutExpired:
        failed, output = True, f"[ERROR] not finished after {_TIMEOUT:.0f} s"
    if failed:
        why = re.search(r"\[ERROR\] (.+)", output)
        raise SetupError(
            f"Maven could not get the jars of the Kafka {name}: "
            f"{why[1] if why else output.strip()[-500:]}",
            hint="it needs the network once (or a mirror, named in ~/.m2/settings.xml); try "
            f"again, or run this on another machine and copy the folder: {by_hand}",
        )
