"""The play: a job is fed, killed in the middle of an epoch, started again, and its result judged.

1. create   a log, and beside it the job file as it is shipped
2. run      `onceflow run` as a child; the stream is appended to the log while it runs
3. kill     when half of this part is read and an epoch is under way: `kill -9` of all processes
4. again    the very same command; what the log got meanwhile waits for it. 3 and 4 for each kill
5. drain    a last event far ahead closes every window; then the job is stopped
6. judge    the truth beside what the targets hold
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from onceflow import errors
from onceflow.demo.feed import Feed
from onceflow.demo.observed import Observed
from onceflow.demo.processes import Event, Run, frozen
from onceflow.demo.stream import DELAY, Stream
from onceflow.demo.verdict import Verdict, compare, judge, read
from onceflow.errors import JobError, LeaseHeld, OnceflowError, SetupError
from onceflow.log.embedded import EmbeddedLog

ARGUMENTS = ["run", "ads.py", "--home", "home", "--every", "500ms"]
_MARK = "demo.json"
_OURS = ("ads.py", "events", "home", "out", "scratch", "run.err", _MARK)  # the mark goes last
_TURN = 0.02  # seconds
_PROGRESS_EVERY = 0.25
_PATIENCE = 180.0  # seconds without a new epoch
_STRIKE_WITHIN = 0.5  # seconds after an epoch was seen to begin


class Play:
    """One performance in one folder. What happens is told to `tell`, an event at a time."""

    def __init__(
        self,
        folder: Path,
        stream: Stream,
        *,
        kills: int,
        onceflow: list[str],
        tell: Callable[[Event], None],
    ) -> None:
        """`onceflow`: how the command is called from here."""
        self.folder = folder.absolute()
        self._stream, self._kills = stream, kills
        self._command = [*onceflow, *ARGUMENTS, "--json"]
        self._show = tell
        self._began = time.monotonic()
        self._chance = random.Random(stream.seed)
        self._job = Observed(self.folder / "home")
        self._doing = ""
        self._shown = self._moved = self._began
        self._seen: tuple[str, int | None] = ("", None)

    def perform(self) -> Verdict:
        # 1. create
        stream = self._stream
        prepare(self.folder, seed=stream.seed, events=stream.events)
        log = EmbeddedLog.create(self.folder / "events")
        self._feed = Feed(stream, log, lives=self._kills + 1)
        self._tell("begin", folder=str(self.folder), seed=stream.seed, events=stream.events,
                   again=stream.again, malformed=stream.malformed, rows=len(stream.rows),
                   kills=self._kills)  # fmt: skip
        try:
            for life in range(self._kills + 1):
                self._live(life)
        finally:
            shutil.rmtree(self.folder / "scratch", ignore_errors=True)

        # 6. judge
        truth, result = stream.truth(), read(self.folder)
        verdict = judge(truth, result)
        self._tell("verdict", exact=verdict.exact, lost=verdict.lost,
                   duplicated=verdict.duplicated, compared=verdict.compared,
                   differences=[{**asdict(d), "says": str(d)} for d in verdict.differences],
                   table=[asdict(line) for line in compare(truth, result)])  # fmt: skip
        return verdict

    def _live(self, life: int) -> None:
        """2. run, or 4. again: until it is killed, or has read all and is stopped."""
        self._doing = "starting"
        self._tell("starting", life=life + 1, command=shlex.join(["onceflow", *ARGUMENTS]))
        with Run(self._command, self.folder, self.folder / "scratch") as run:
            while self._doing == "starting":
                self._turn(run)
                self._feed.append_while_down(life)
            if life < self._kills:
                self._kill(run, after=self._feed.half_of_part(life))
            else:
                self._drain(run)

    def _kill(self, run: Run, *, after: float) -> None:
        """3. kill, at some moment between the beginning of an epoch and its end."""
        within = _STRIKE_WITHIN
        while True:
            self._turn(run)
            self._feed.append(read=self._job.rows_read())
            if self._job.rows_read() < after or self._job.under_way() is None:
                continue
            time.sleep(within * self._chance.random())
            within /= 2  # if this comes too late: epochs are short
            leader = self._job.leader()
            if leader is None:
                continue
            with frozen(leader.pid):  # what is seen now is what is killed
                epoch = self._job.under_way()
                if epoch is None:
                    continue
                ended = run.kill(leader.pid)
            last = self._job.epoch()
            self._tell("killed", processes=[asdict(process) for process in ended], epoch=epoch,
                       decided=last is not None and last >= epoch)  # fmt: skip
            return

    def _drain(self, run: Run) -> None:
        """5. drain, and stop."""
        while not self._feed.done:
            self._turn(run)
            self._feed.append_the_rest()
        self._doing = "draining"
        self._tell("draining")
        rows, closed = self._feed.close(), self._stream.closing.event_time - DELAY
        while not self._job.drained(rows=rows, watermark_ms=closed.timestamp() * 1000):
            self._turn(run)
        self._doing = "stopping"
        run.stop()
        while not run.ended():
            self._turn(run)
        if run.code != 0:
            raise SetupError(run.how_it_ended(), hint="onceflow doctor looks at the machine")
        self._tell("stopped", epoch=self._job.epoch())

    # -------------------------------------------------------------- hearing and telling

    def _turn(self, run: Run) -> None:
        """A moment of waiting: hear what the job says, show how it goes, lose no patience."""
        over = run.ended()
        for event in run.events():
            self._hear(event)
        if over and self._doing != "stopping":
            raise SetupError(run.how_it_ended(), hint="onceflow doctor looks at the machine")
        now, seen = time.monotonic(), (self._doing, self._job.epoch())
        if seen != self._seen:
            self._seen, self._moved = seen, now
        if now - self._moved > _PATIENCE:
            raise SetupError(
                f"the job has come no further for {_PATIENCE:.0f} seconds",
                hint=f"see {self.folder}/home/ads/spark.log",
            )
        if now - self._shown > _PROGRESS_EVERY:
            self._shown = now
            read = min(self._job.rows_read(), self._feed.rows)
            self._tell("progress", doing=self._doing, appended=self._feed.appended,
                       read=read, of=self._feed.rows, epoch=self._job.epoch())  # fmt: skip
        time.sleep(_TURN)

    def _hear(self, event: Event) -> None:
        match event["event"]:
            case "started":
                counts = event["queries"]["counts"]
                self._doing = "running" if self._doing == "starting" else self._doing
                self._tell("started", driver=event["pid"], term=counts["term"],
                           resumes_after=counts["resumes_after"])  # fmt: skip
            case "restarting":
                self._tell("restarting", message=event["message"])
            case "error":
                kind = getattr(errors, event["kind"], OnceflowError)
                error: OnceflowError = kind(event["message"], hint=event["hint"])
                error.exit_code = event["exit_code"]
                raise error

    def _tell(self, event: str, **fields: Any) -> None:
        seconds = round(time.monotonic() - self._began, 1)
        self._show({"event": event, "seconds": seconds, **fields})


def prepare(folder: Path, **facts: int) -> None:
    """A new folder, or that of an earlier demo without what it left, with the job file in it."""
    shipped = resources.files("onceflow.demo").joinpath("ads.py").read_text()
    if folder.exists() and not folder.is_dir():
        raise JobError(f"{folder} is not a folder", hint="name another: --folder DIR")
    if folder.is_dir() and any(folder.iterdir()):
        _refuse_to_replace(folder, shipped)
        for path in (folder / name for name in _OURS):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text(json.dumps(facts) + "\n")
    (folder / "ads.py").write_text(shipped)


def _refuse_to_replace(folder: Path, shipped: str) -> None:
    if not (folder / _MARK).is_file():
        raise JobError(
            f"{folder} holds files that are not of a demo", hint="name another: --folder DIR"
        )
    leader = Observed(folder / "home").leader()
    if leader is not None:
        raise LeaseHeld(f"the job in {folder} is led by {leader}", hint="stop it there")
    job = folder / "ads.py"
    if job.is_file() and job.read_text() != shipped:
        raise JobError(
            f"{job} was changed, and a new demo would replace it",
            hint="move it away, or name another folder: --folder DIR",
        )
