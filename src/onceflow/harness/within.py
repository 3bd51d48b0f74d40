"""Code of a test around what a process of `onceflow verify` does."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext


def within() -> AbstractContextManager[object]:
    """The context manager that ONCEFLOW_VERIFY_WITHIN=FILE.py:function names, if it names one. Our
    tests install wrong protocols that way, to see that they are noticed."""
    file, _, function = os.environ.get("ONCEFLOW_VERIFY_WITHIN", "").rpartition(":")
    if not file:
        return nullcontext()
    spec = importlib.util.spec_from_file_location("onceflow_verify_within", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: AbstractContextManager[object] = getattr(module, function)()
    return found
