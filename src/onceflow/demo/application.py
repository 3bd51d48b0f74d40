"""The reference application as data: where it is shipped, how it is copied, how it is loaded."""

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
    """In the wheel it is beside this file, in a checkout it is among the examples."""
    for place in (_HERE / PACKAGE, _HERE.parents[2] / "examples" / PACKAGE):
        if (place / "__init__.py").is_file():
            return place
    raise SetupError(
        "the demo's application (ads) is not where it should be",
        hint="install onceflow again, or run it from a whole checkout",
    )


def copy(folder: Path) -> dict[str, str]:
    """Put the application into `folder`; file -> digest of what was put there."""
    shutil.copytree(shipped(), folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return digests(folder)


def digests(folder: Path) -> dict[str, str]:
    """Of the application's files in `folder`, as they are now."""
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
        """As the environment says: under the folder, or in servers."""
        return self.module("places").Places.from_environment(self.folder)

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(self.module("world").REGIONS)

    def feed(self, *, seed: int, rate: int) -> Feed:
        """A new stream of so many events a second, and its truth."""
        speed = self.module("world").SPEED
        stream = self.module("stream").Stream(seed=seed, per_minute=rate * 60 // speed)
        sender = self.module("feed").Feed(self.places, stream)
        return Feed(sender, self.module("truth").Truth(), chunks_per_s=speed)

    # -------------------------------------------------------------- looking at what came out

    def clicks_served(self) -> dict[str, int]:
        """By campaign, in the serving table as it is now; empty before there is one."""
        query = "SELECT campaign, sum(clicks) FROM ad_minutes GROUP BY campaign"
        return {campaign: int(clicks) for campaign, clicks in self._ask_serving(query)}

    def orders_served(self) -> int:
        found = self._ask_serving("SELECT count(*) FROM attributions")
        return int(found[0][0]) if found else 0

    def campaigns(self) -> list[Any]:
        """What the budget service has charged to each; none before it has begun."""
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
