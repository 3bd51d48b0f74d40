"""The example application: where it is shipped, how it is copied and loaded."""

from __future__ import annotations

import hashlib
import importlib
import shutil
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

from onceflow.demo.feed import Feed
from onceflow.errors import ServerSilent, SetupError

PACKAGE = "ads"
_HERE = Path(__file__).parent


def shipped() -> Path:
    """In a wheel it is beside this file, in a checkout among the examples."""
    for place in (_HERE / PACKAGE, _HERE.parents[2] / "examples" / PACKAGE):
        if (place / "__init__.py").is_file():
            return place
    raise SetupError(
        "the demo's application (ads) is not installed",
        hint="install onceflow again, or run it from a whole checkout",
    )


def copy(folder: Path) -> dict[str, str]:
    """Copy the application into `folder`; returns file -> digest."""
    shutil.copytree(shipped(), folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    """File -> digest, of the application's files in `folder` as they are now."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / PACKAGE).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


class Application:
    """The application in a folder: its modules, and where its streams and tables are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in [n for n in sys.modules if n == PACKAGE or n.startswith(f"{PACKAGE}.")]:
            del sys.modules[name]  # of another folder
        sys.path[:] = [str(folder), *(path for path in sys.path if path != str(folder))]
        importlib.invalidate_caches()

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{PACKAGE}.{name}")

    @cached_property
    def places(self) -> Any:
        """Under the folder, or on servers that the environment names."""
        return self.module("places").Places.from_environment(self.folder)

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(self.module("world").REGIONS)

    def feed(self, *, seed: int, rate: int) -> Feed:
        """A new stream of so many events a second, and its expected result."""
        speed = self.module("world").SPEED
        stream = self.module("stream").Stream(seed=seed, per_minute=rate * 60 // speed)
        sender = self.module("feed").Feed(self.places, stream)
        return Feed(sender, self.module("truth").Truth(), chunks_per_s=speed)

    # -------------------------------------------------------------- outputs

    def clicks_served(self) -> dict[str, int]:
        """Clicks by campaign in the serving table; empty before the table exists."""
        query = "SELECT campaign, sum(clicks) FROM ad_minutes GROUP BY campaign"
        return {campaign: int(clicks) for campaign, clicks in self._ask_serving(query)}

    def orders_served(self) -> int:
        found = self._ask_serving("SELECT count(*) FROM attributions")
        return int(found[0][0]) if found else 0

    def campaigns(self) -> list[Any]:
        """The campaigns with their charges; none before the budget service has begun."""
        return list(self.module("budget").campaigns(self.places))

    def _ask_serving(self, query: str) -> list[tuple[Any, ...]]:
        places = self.places
        if places.dsn is None:
            rows = self.module("database").rows(places.serving_file, query)
            return [tuple(row.values()) for row in rows]
        import psycopg

        try:
            with psycopg.connect(places.dsn, connect_timeout=10) as server:
                return list(server.execute(query).fetchall())
        except psycopg.errors.UndefinedTable:
            return []
        except psycopg.OperationalError as error:
            raise ServerSilent(
                f"the serving table cannot be read: {error}", hint="is PostgreSQL up?"
            ) from error
