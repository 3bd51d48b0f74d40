"""Wait until Spark has released the state of queries that have ended."""

from __future__ import annotations

from typing import Any

from waiting import wait_for

_STORE = "org.apache.spark.sql.execution.streaming.state.StateStore$"


def wait_for_state_at_rest(spark: Any) -> None:
    """Its maintenance comes once more after the end of a query and writes state, even if a
    test has removed, moved or set back a folder meanwhile: it has to wait for that."""
    store = spark._jvm.java.lang.Class.forName(_STORE)

    def held(name: str) -> Any:
        field = store.getDeclaredField(name)
        field.setAccessible(True)
        return field.get(None)

    loaded, at_work = held("loadedProviders"), held("maintenancePartitions")
    wait_for(lambda: loaded.isEmpty() and at_work.isEmpty())
