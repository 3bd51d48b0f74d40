"""A Kafka broker and a PostgreSQL for `onceflow demo --kafka`, which end with the demo."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from onceflow.contract.extras import require
from onceflow.demo.folder import SERVERS
from onceflow.harness.servers import Servers
from onceflow.spark import jars


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Both run inside the block. Yields the environment that names them to the application.

    The password is in a file that only its owner can read, never on a command line.
    """
    for extra in ("kafka", "postgres"):
        require(extra, "onceflow demo --kafka")
    connector = os.environ.get("ONCEFLOW_JARS") or str(jars.fetch("connector"))
    place = folder / SERVERS
    place.mkdir()
    try:
        with Servers(place, ("kafka", "postgres")) as running:
            assert running.kafka is not None
            assert running.postgres is not None
            named = place / "postgres.dsn"
            with open(os.open(named, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(running.postgres.dsn + "\n")
            yield {
                "ADS_KAFKA": running.kafka.servers,
                "ADS_POSTGRES_FILE": str(named),
                "ONCEFLOW_JARS": connector,
            }
    finally:
        shutil.rmtree(place, ignore_errors=True)
