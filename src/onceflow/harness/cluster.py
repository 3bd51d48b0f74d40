"""A standalone cluster on loopback: a master, two workers, executors that can be killed."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from onceflow.errors import SetupError

_DEPLOY = "org.apache.spark.deploy"
_HOSTS = ("127.0.0.1", "127.0.0.2")  # Spark speculates only on another host
_UP_WITHIN = 90.0  # seconds
SETTINGS = {
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1.5",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.minTaskRuntime": "1s",
    "spark.excludeOnFailure.enabled": "false",
}


@contextlib.contextmanager
def cluster(
    folder: Path, *, port: int | None = None, hidden: Sequence[Path] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """The master's URL and the settings of a session on it. Nothing of it is left afterwards.

    `hidden`: folders that workers have as empty ones of their own (that takes the right to mount).
    """
    port = port or _free_port()
    if _listens(port):
        raise SetupError(f"port {port} is taken", hint="end what listens there")
    master, started = f"spark://127.0.0.1:{port}", []
    logs = folder / "cluster"
    logs.mkdir()
    try:
        started.append(
            _run(logs / "master.log", "127.0.0.1", f"{_DEPLOY}.master.Master", "--host",
                 "127.0.0.1", "--port", str(port), "--webui-port", "0")
        )  # fmt: skip
        _wait_until(lambda: _listens(port), started, logs)
        for number, host in enumerate(_HOSTS):
            log = logs / f"worker-{number}.log"
            started.append(
                _run(log, host, f"{_DEPLOY}.worker.Worker", "--host", host, "--webui-port", "0",
                     "--cores", "4", "--memory", "4g", "--work-dir", str(logs / "work"), master,
                     hidden=hidden)
            )  # fmt: skip
            _wait_until(partial(_registered, log), started, logs)
        path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH", "")]))
        yield master, {**SETTINGS, "spark.executorEnv.PYTHONPATH": path}
    finally:
        for process in reversed(started):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its executors
            process.wait()


def can_hide() -> bool:
    """May this process mount?"""
    tried = ["unshare", "-m", "mount", "-t", "tmpfs", "onceflow", "/mnt"]
    return not subprocess.run(tried, check=False, capture_output=True).returncode


def _run(log: Path, ip: str, *command: str, hidden: Sequence[Path] = ()) -> subprocess.Popen[bytes]:
    import pyspark

    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
    environment = {
        **os.environ, "SPARK_LOCAL_IP": ip, "SPARK_PUBLIC_DNS": ip,
        "PYSPARK_PYTHON": sys.executable,
        # Executors that are killed on purpose must not end the application.
        "SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1",
    }  # fmt: skip
    full = [str(spark_class), *command]
    if hidden:
        mounts = [f"mount -t tmpfs onceflow {shlex.quote(str(path))}" for path in hidden]
        full = ["unshare", "-m", "sh", "-ec", "; ".join([*mounts, 'exec "$@"']), "sh", *full]
    with log.open("wb") as said:
        return subprocess.Popen(
            full, env=environment, stdin=subprocess.DEVNULL, stdout=said,
            stderr=said, start_new_session=True,
        )  # fmt: skip


def _wait_until(
    condition: Callable[[], bool], started: list[subprocess.Popen[bytes]], logs: Path
) -> None:
    deadline = time.monotonic() + _UP_WITHIN
    while not condition():
        if any(p.poll() is not None for p in started) or time.monotonic() > deadline:
            newest = max(logs.glob("*.log"), key=lambda path: path.stat().st_mtime)
            lines = _text(newest).strip().splitlines()
            raise SetupError(
                f"the cluster does not start: {lines[-1] if lines else 'it said nothing'}",
                hint="onceflow doctor looks at Java and Spark; --master local needs no cluster",
            )
        time.sleep(0.05)


def _registered(log: Path) -> bool:
    return "Successfully registered" in _text(log)


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
