"""A run of the demo: the whole application gets events, is killed in an epoch, and is checked.

1. create   a folder with a copy of the application, and its logs (or topics)
2. start    the page, the two services and the three jobs; events are fed from now on
3. kill     while all work: `kill -9` of a whole job in the middle of an epoch or, with chaos, of
            something every few seconds
4. restart  by the same command; events that were fed meanwhile wait for it
5. drain    feed the last events, which close everything; when all is read, stop all processes
6. check    compare every output with the expected result
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onceflow.demo.app_processes import AppProcess, JobProcess, Surroundings, services
from onceflow.demo.application import Application
from onceflow.demo.drain import Drain
from onceflow.demo.folder import HOME, SAID, SCRATCH, prepare
from onceflow.demo.result import result
from onceflow.demo.sampling import EVERY as SAMPLE_EVERY
from onceflow.demo.sampling import Sampling
from onceflow.demo.strikes import SEEN, Chaos, Plan, Strike
from onceflow.errors import SetupError
from onceflow.harness.processes import Event
from onceflow.harness.repeated import Repeated
from onceflow.testing.servers.process import free_ports

JOBS = ("aggregation", "attribution", "load")
_TURN = 0.02  # seconds
_PROGRESS_EVERY = 0.25
_FEED_EVERY = 0.1
_PATIENCE = 180.0  # seconds without any progress
_FIRST_STRIKE = 0.4  # of `seconds`
_MOST_DIFFERENCES = 100


@dataclass(frozen=True)
class Settings:
    """The options of a run. `seconds` count from the moment when all jobs have started; None: until
    `DemoRun.finish` is called."""

    seed: int = 1
    rate: int = 2_000  # events a second
    seconds: float | None = 30.0
    kills: int = 1
    chaos: bool = False
    kafka: bool = False


class DemoRun:
    """One run in one folder. It calls `tell` with each event."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        tell: Callable[[Event], None],
        page: Callable[[Path], Any] | None = None,
    ) -> None:
        """`page`: makes the page of a home, a context manager that has `url` and `token`."""
        self.folder = folder.absolute()
        self._settings, self._show, self._page = settings, tell, page
        self._began = time.monotonic()
        self._doing = "starting"
        self._shown = self._moved = self._began
        self._seen: Any = None
        self._finish = False
        self._url: str | None = None

    def finish(self) -> None:
        """Stop feeding, drain and check. Call it at any time, to end a run without `seconds`."""
        self._finish = True

    def run(self) -> Any:
        """Returns the verdict of the application's own check."""
        with ExitStack() as stack:
            # 1. create
            settings = self._settings
            prepare(self.folder, seed=settings.seed, rate=settings.rate, kafka=settings.kafka)
            stack.callback(shutil.rmtree, self.folder / SCRATCH, ignore_errors=True)
            self._tell("begin", folder=str(self.folder), seed=settings.seed, rate=settings.rate,
                       lasts_s=settings.seconds, kills=settings.kills, chaos=settings.chaos,
                       kafka=settings.kafka)  # fmt: skip
            self._open_page(stack)
            named = stack.enter_context(self._servers())
            app = self._app = Application(self.folder)
            app.places.create()

            # 2. start
            stage = Surroundings(self.folder, self._tell, settings.rate)
            self._services = services(stage, port=int(named["ADS_ORDERS"].rpartition(":")[2]))
            self._jobs = [JobProcess(name, stage) for name in JOBS]
            self._parts: list[AppProcess] = [*self._services, *self._jobs]
            for part in self._parts:
                stack.enter_context(part).start()
            self._feed = app.feed(seed=settings.seed, rate=settings.rate)
            self._board = Sampling(app, self._feed, self.folder / HOME)
            feeding = stack.enter_context(Repeated(self._feed.turn, every=_FEED_EVERY))
            sampling = stack.enter_context(Repeated(self._board.turn, every=SAMPLE_EVERY))
            self._beside = [feeding, sampling]
            self._start_all()
            self._kill_and_restart()
            feeding.stop()
            self._drain()
            sampling.stop()

            # 6. check
            return self._check()

    def _open_page(self, stack: ExitStack) -> None:
        """Before anything else, so that users can watch from the beginning."""
        if self._page is not None:
            page = stack.enter_context(self._page(self.folder / HOME))
            self._url = page.url
            self._tell("page", url=page.url, token=page.token)

    @contextmanager
    def _servers(self) -> Iterator[dict[str, str]]:
        """Yields the environment of the application: addresses of the order service and servers."""
        (port,) = free_ports(1)
        named = {"ADS_ORDERS": f"http://127.0.0.1:{port}"}
        if not self._settings.kafka:
            with _set(named):
                yield named
            return
        from onceflow.demo.servers import servers

        self._tell("servers", doing="starting")
        with servers(self.folder) as more, _set(named | more):
            self._tell("servers", doing="running", kafka=more["ADS_KAFKA"])
            yield named | more

    # -------------------------------------------------------------- steps

    def _start_all(self) -> None:
        while not (self._finish or all(part.running for part in self._parts)):
            self._turn()
        self._doing = "running"
        self._running_since = time.monotonic()
        if not self._finish:
            self._tell("playing", url=self._url)

    def _kill_and_restart(self) -> None:
        """3. kill and 4. restart, until all strikes are over and all jobs work."""
        settings = self._settings
        strikes: Plan | Chaos
        if settings.chaos:
            strikes = Chaos(self._jobs, self._services, seed=settings.seed)
        else:
            budget = next(part for part in self._services if part.name == "budget")
            strikes = Plan(self._jobs, budget, kills=settings.kills, seed=settings.seed)
        seconds = 30.0 if settings.seconds is None else settings.seconds
        first = 0.0 if settings.chaos else _FIRST_STRIKE * seconds
        while not (self._finish or (self._is_time_over() and strikes.over and self._all_work())):
            self._turn()
            running = time.monotonic() - self._running_since
            if running < first or (settings.chaos and self._is_time_over()):
                continue
            struck = strikes.strike()
            if struck is not None:
                self._struck(struck)

    def _struck(self, strike: Strike) -> None:
        self._tell("killed", **strike.fields(), says=strike.says)
        self._board.mark("kill", strike.says)
        part = next(part for part in self._parts if part.name == strike.part)
        if part.gone():
            part.start()
            self._board.mark("start", part.command)

    def _is_time_over(self) -> bool:
        lasts = self._settings.seconds
        return lasts is not None and time.monotonic() - self._running_since >= lasts

    def _all_work(self) -> bool:
        epochs = 1 if self._settings.chaos else SEEN
        return all(part.running for part in self._services) and all(
            job.has_worked(epochs) for job in self._jobs
        )

    def _drain(self) -> None:
        """5. drain, and stop."""
        self._feed.close()
        self._doing = "draining"
        self._tell("draining", rows=self._feed.rows, chunks=self._feed.chunks)
        drain = Drain(self._app.places, self._app.regions, self._jobs, self._left)
        while not drain.done():
            self._turn()
        self._doing = "stopping"
        for part in self._parts:
            part.stop()
        while not all(part.ended() for part in self._parts):
            self._turn()
        epochs = {job.name: job.job_progress.epochs() for job in self._jobs}
        self._turn()
        self._tell("stopped", epochs=epochs)

    def _left(self) -> dict[str, int]:
        """What is still missing in the outputs: orders that wait, clicks to be charged."""
        events = [event for some in self._feed.truth.events.values() for event in some.values()]
        orders = sum(event.order is not None for event in events)
        clicks = sum(self._feed.truth.clicks_by_campaign().values())
        charged = sum(campaign.clicks for campaign in self._app.campaigns())
        return {"orders": orders - self._app.orders_served(), "clicks": clicks - charged}

    def _check(self) -> Any:
        truth = self._feed.truth
        verdict = self._app.module("check").check(self._app.places, truth)
        self._board.sample(now=True)
        self._board.mark("verdict", _says(verdict), exact=verdict.exact)
        self._tell("verdict", exact=verdict.exact, lost=verdict.lost,
                   duplicated=verdict.duplicated, compared=verdict.compared,
                   differing=len(verdict.differences),
                   differences=[{**asdict(difference), "says": str(difference)}
                                for difference in verdict.differences[:_MOST_DIFFERENCES]],
                   **result(self._app, truth))  # fmt: skip
        return verdict

    # -------------------------------------------------------------- events

    def _turn(self) -> None:
        """Wait a moment, read the events of all processes, and report progress."""
        for part in self._parts:
            part.read_events()
        for steady in self._beside:
            steady.raise_failure()
        now = time.monotonic()
        if now - self._shown > _PROGRESS_EVERY:
            self._shown = now
            self._refuse_standstill(now)
            self._tell("progress", doing=self._doing, rows=self._feed.rows,
                       rows_per_s=round(self._feed.rows_per_s()),
                       jobs={job.name: job.how_it_goes() for job in self._jobs})  # fmt: skip
        time.sleep(_TURN)

    def _refuse_standstill(self, now: float) -> None:
        seen = (self._doing, [(part.running, part.lives) for part in self._parts],
                [job.job_progress.epochs() for job in self._jobs])  # fmt: skip
        if seen != self._seen:
            self._seen, self._moved = seen, now
        if now - self._moved > _PATIENCE:
            raise SetupError(
                f"nothing has changed for {_PATIENCE:.0f} seconds ({self._doing}): "
                + ", ".join(f"{part.name} {part.state}" for part in self._parts),
                hint=f"see {self.folder}/{HOME}/*/spark.log and {self.folder}/{SAID}",
            )

    def _tell(self, event: str, **fields: Any) -> None:
        seconds = round(time.monotonic() - self._began, 1)
        self._show({"event": event, "seconds": seconds, **fields})


@contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    """Inside the block these are the only variables of the application (ADS_…)."""
    before = dict(os.environ)
    for name in [name for name in before if name.startswith("ADS_")]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _says(verdict: Any) -> str:
    return f"lost {verdict.lost:,}, duplicated {verdict.duplicated:,}"
