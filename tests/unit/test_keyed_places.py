"""Keys of rows and of timers that are due, put together by where they lie."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from onceflow.state.keys import unique_keys


@pytest.mark.parametrize("far", [5, 3 * 2**61])
def test_keys_are_in_the_order_of_their_places_however_far_these_are_apart(far: int) -> None:
    """A task that has all places: from its last row to its first timer it is further than a long
    can say."""
    rows, timers = [-far, -far, 0, far], [-far, 0]
    keys = pa.table({"key": ["a", "a", "m", "z", "a", "m"]})
    places, found, number = unique_keys(np.array(rows + timers), keys)
    assert places.tolist() == [-far, 0, far]
    assert found["key"].to_pylist() == ["a", "m", "z"]
    assert number.tolist() == [0, 0, 1, 2, 0, 1]
