"""Secrets among the settings of a sink: they are written down as `env:NAME`, never as they are."""

from __future__ import annotations

import os
import re
from typing import Any

from onceflow.errors import SetupError

_ENV = "env:"
_SECRET = re.compile(r"password|passwd|secret|token|credential", re.IGNORECASE)


def is_secret(name: str, value: Any) -> bool:
    """Would this setting give a secret away, by its name?"""
    named = isinstance(value, str) and value.startswith(_ENV)
    return value is not None and not named and bool(_SECRET.search(name))


def from_environment(value: str) -> str:
    """What the environment has for `env:NAME`; any other value as it is."""
    if not value.startswith(_ENV):
        return value
    name = value.removeprefix(_ENV)
    if name not in os.environ:
        raise SetupError(f"the variable {name} is not set", hint=f"export {name}=…")
    return os.environ[name]
