"""Tools for the tests of users: the sink contract, the keyed harness, real servers.

Lives here: suites and servers for tests of jobs, sinks and keyed processes. May not live here:
anything that the product imports when it runs. Start reading in `contract.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onceflow.testing.contract import SinkContract
    from onceflow.testing.keyed import KeyedHarness

__all__ = ["KeyedHarness", "SinkContract"]


def __getattr__(name: str) -> Any:
    """Import a name when it is used: only the contract of sinks needs pytest."""
    if name == "KeyedHarness":
        from onceflow.testing.keyed import KeyedHarness

        return KeyedHarness
    if name != "SinkContract":
        raise AttributeError(f"module 'onceflow.testing' has no attribute {name!r}")
    try:
        import pytest
    except ImportError:
        from onceflow.errors import SetupError

        raise SetupError("the contract of sinks needs pytest", hint="pip install pytest") from None
    # Failed assertions then show the values.
    for module in ("commit_errors", "contract", "rewinding", "row_tests", "under_test"):
        pytest.register_assert_rewrite(f"{__name__}.{module}")
    from onceflow.testing.contract import SinkContract

    return SinkContract
