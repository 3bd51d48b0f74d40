"""A Kafka broker and a PostgreSQL for `onceflow demo --kafka`, which end with the demo."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from onceflow.contract.extras import require
from onceflow.demo.folder import SERVERS
from onceflow.spark import jars
from onceflow.testing.servers import Kafka, Postgres


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[dict[str, str]]:
    """Both run, and what they made is removed after. What is given names them to the application.

    The password is in a file that only its owner can read, never on a command line.
    """
    refuse_missing_clients()
    connector = os.environ.get("ONCEFLOW_JARS") or str(jars.fetch("connector"))
    place = folder / SERVERS
    place.mkdir()
    with (
        _removed(place),
        Kafka(place / "kafka") as broker,
        Postgres(place / "postgres") as database,
    ):
        named = place / "postgres.dsn"
        with open(os.open(named, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(database.dsn + "\n")
        yield {
            "ADS_KAFKA": broker.servers,
            "ADS_POSTGRES_FILE": str(named),
            "ONCEFLOW_JARS": connector,
        }


@contextlib.contextmanager
def _removed(place: Path) -> Iterator[None]:
    try:
        yield
    finally:
        shutil.rmtree(place, ignore_errors=True)


def refuse_missing_clients() -> None:
    for extra in ("kafka", "postgres"):
        require(extra, "onceflow demo --kafka")
