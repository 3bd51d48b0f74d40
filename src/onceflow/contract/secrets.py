"""Secrets among settings: onceflow writes `env:NAME` to disk, and never a value."""

from __future__ import annotations

import os
import re
from typing import Any

from onceflow.errors import SetupError

_ENV = "env:"
_SECRET = re.compile(r"password|passwd|secret|token|credential", re.IGNORECASE)


def is_secret(name: str, value: Any) -> bool:
    """Does this setting, judged by its name, hold a secret?"""
    return value is not None and not names_variable(value) and bool(_SECRET.search(name))


def names_variable(value: Any) -> bool:
    """Does this value name an environment variable (`env:NAME`)?"""
    return isinstance(value, str) and value.startswith(_ENV)


def from_environment(value: str) -> str:
    """The value of the variable NAME for `env:NAME`; any other value unchanged."""
    if not names_variable(value):
        return value
    name = value.removeprefix(_ENV)
    if name not in os.environ:
        raise SetupError(f"the variable {name} is not set", hint=f"export {name}=…")
    return os.environ[name]
