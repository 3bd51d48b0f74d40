"""Which versions of Spark are supported."""

from __future__ import annotations

import re

from onceflow.errors import SetupError

SUPPORTED = ((4, 2), (4, 3))


def check_version(version: str) -> None:
    parts = version.split(".")
    if tuple(int(re.sub(r"\D.*", "", p)) for p in parts[:2]) not in SUPPORTED:
        known = ", ".join(f"{a}.{b}" for a, b in SUPPORTED)
        raise SetupError(
            f"Spark {version} is not supported: onceflow knows the inside of {known}",
            hint="pip install 'pyspark>=4.2,<4.4'",
        )
