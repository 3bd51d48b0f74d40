"""Jars that are neither in PySpark nor in a wheel: got by Maven once, then kept.

`python -m onceflow.spark.jars connector` prints the folder of Spark's Kafka connector, and
gets it first if need be; `broker` is Kafka itself, for tests and examples. The POM of that name
beside this file lists the jars. A folder is complete or does not exist.
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
_GOT_WITHIN = 900.0  # seconds


def fetch(name: str) -> Path:
    """The folder with these jars, which needs Maven and a network if it is not there yet."""
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
            if not folder.is_dir():  # not somebody else's, who was faster
                raise
    return folder


def folder_of(name: str) -> Path:
    """Where the jars are, or would be. Another POM has another folder."""
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
            f"Maven (mvn) is missing; it gets the jars of the Kafka {name}",
            hint="install it (Debian and Ubuntu: apt-get install maven; macOS: brew install "
            f"maven), or where it is, run: {by_hand}",
        )
    shutil.copy(pom(name), unfinished / "pom.xml")  # Maven may write beside it
    to = f"-DoutputDirectory={unfinished / 'jars'}"
    command = [maven, "-B", "-q", "-f", "pom.xml", "dependency:copy-dependencies", to]
    try:
        done = subprocess.run(
            command, cwd=unfinished, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", timeout=_GOT_WITHIN,
        )  # fmt: skip
        failed, said = done.returncode != 0, done.stdout
    except subprocess.TimeoutExpired:
        failed, said = True, f"[ERROR] no end after {_GOT_WITHIN:.0f} s"
    if failed:
        why = re.search(r"\[ERROR\] (.+)", said)
        raise SetupError(
            f"Maven could not get the jars of the Kafka {name}: "
            f"{why[1] if why else said.strip()[-500:]}",
            hint="it needs the network once (or a mirror, named in ~/.m2/settings.xml); try "
            f"again, or bring the folder from elsewhere: {by_hand}",
        )
