"""Waits until everything that was fed is in the outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from onceflow.demo.app_processes import JobProcess
from onceflow.harness import server_targets
from onceflow.harness.epoch_logs import Position, positions
from onceflow.log.embedded import EmbeddedLog

# What each job reads, in the order in which the jobs read each other.
READS = {
    "aggregation": ("raw",),
    "attribution": ("events",),
    "load": ("counts", "attributed"),
}
_LOOK_EVERY = 0.5  # seconds
_STILL = 20.0  # seconds without change; what has not come by then is lost, and the check finds it


class Drain:
    """Looks now and then whether jobs and services have done everything.

    It looks at the jobs in their order, and whether an epoch of each is under way: when the last
    job has read everything, nothing can follow. `left` returns what services still have to do, and
    the orders that wait for their time.
    """

    def __init__(
        self,
        places: Any,
        regions: tuple[str, ...],
        jobs: list[JobProcess],
        left: Callable[[], dict[str, int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`places`: of the application."""
        self._places, self._regions, self._jobs = places, regions, jobs
        self._left, self._clock = left, clock
        self._looked = float("-inf")
        self._seen: Any = None
        self._moved = clock()

    def done(self) -> bool:
        now = self._clock()
        if now - self._looked < _LOOK_EVERY:
            return False
        self._looked = now
        idle = all(self._has_read_all(job) for job in self._jobs)
        left = self._left() if idle else None
        seen = (left, [job.job_progress.epochs() for job in self._jobs])
        if seen != self._seen:
            self._seen, self._moved = seen, now
        if left is None:
            return False
        return not any(left.values()) or now - self._moved > _STILL

    def _has_read_all(self, job: JobProcess) -> bool:
        if job.job_progress.under_way() is not None:
            return False
        read = {at for offset in job.job_progress.offsets().values() for at in positions(offset)}
        return all(
            end in read
            for stream in READS[job.name]
            for end in ends(self._places, stream, self._regions)
        )


def ends(places: Any, stream: str, regions: tuple[str, ...]) -> Iterator[Position]:
    """Where a stream ends, in each region."""
    if places.kafka is None:
        for region in regions:
            log = EmbeddedLog(places.log(stream, region))
            yield str(log.path), tuple(log.view.next)
        return
    found = server_targets.ends(places.kafka, [places.topic(stream, region) for region in regions])
    for region in regions:
        topic = places.topic(stream, region)
        yield topic, tuple(end for (name, _), end in sorted(found.items()) if name == topic)
