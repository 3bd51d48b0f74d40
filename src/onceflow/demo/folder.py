"""The folder of a demo: each run starts over, but never replaces a user's work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from onceflow.demo import application
from onceflow.demo.job_progress import JobProgress
from onceflow.errors import JobError, LeaseHeld
from onceflow.protocol.home import jobs

HOME, SCRATCH, SAID, SERVERS = "home", "scratch", "said", "servers"
_MARK = "demo.json"
_DATABASES = ("serving.db", "answers.db", "budget.db")
_OURS = (
    application.PACKAGE, "raw", "events", "counts", "rejected", "attributed", "late", "warehouse",
    *(name + end for name in _DATABASES for end in ("", "-wal", "-shm", "-journal")),
    "stream.json", HOME, SCRATCH, SAID, SERVERS, _MARK,  # the mark is removed last
)  # fmt: skip


def prepare(folder: Path, **facts: Any) -> None:
    """Copy the application into a new folder, or into that of an earlier demo after clearing it."""
    if folder.exists() and not folder.is_dir():
        raise JobError(f"{folder} is not a folder", hint="name another: --folder DIR")
    if folder.is_dir() and any(folder.iterdir()):
        _refuse_to_replace(folder)
        for path in (folder / name for name in _OURS):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    _write_mark(folder, facts)  # first, because the rest may be interrupted
    (folder / HOME).mkdir()
    _write_mark(folder, {**facts, "files": application.copy(folder)})


def _write_mark(folder: Path, facts: dict[str, Any]) -> None:
    (folder / _MARK).write_text(json.dumps(facts, indent=1) + "\n")


def _refuse_to_replace(folder: Path) -> None:
    try:
        mark = json.loads((folder / _MARK).read_text())
    except (OSError, ValueError):
        raise JobError(
            f"{folder} holds files that no demo made", hint="name another: --folder DIR"
        ) from None
    for job in jobs(folder / HOME):
        leader = JobProgress(folder / HOME, job.name).leader()
        if leader is not None:
            raise LeaseHeld(f"job {job.name} in {folder} is led by {leader}", hint="stop it there")
    copied = mark.get("files")
    found = application.digests(folder)
    for name in sorted(found if copied is not None else ()):
        if found[name] != copied.get(name):
            raise JobError(
                f"{folder / name} was changed, and a new demo would replace it",
                hint="move it away, or name another folder: --folder DIR",
            )
