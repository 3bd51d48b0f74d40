"""What a restore or a rollback would do, and the command that does it. Nothing is ever changed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from onceflow.errors import JobError, OnceflowError
from onceflow.page.api import BadRequest
from onceflow.protocol.home import JobFolder, chosen
from onceflow.protocol.lineage import CHOICES
from onceflow.snapshots.epochs import retained
from onceflow.snapshots.restore import Restore
from onceflow.snapshots.savepoints import Savepoints
from onceflow.store.names import check_name

Row = dict[str, Any]

MEANS = {
    "rewind": "take them back where the target can",
    "skip": "leave them; compute their epochs again without publishing",
    "replay": "publish them once more: duplicates",
}


def plan(home: Path, job: str, *, restore: str, rollback: str, published: str) -> Row:
    """As `onceflow restore --plan --json`, and the command. `restore`: a savepoint of the job;
    or `rollback`: a retained epoch, or a time. Refuses what a target cannot do."""
    folder = chosen(home, check_name("job", job))[0]
    if published not in CHOICES:
        raise BadRequest(f"{published!r} is no choice", hint=f"one of {', '.join(CHOICES)}")
    if bool(restore) == bool(rollback):
        raise BadRequest("a plan is for one thing", hint="restore=SAVEPOINT, or rollback=EPOCH")
    answers = [vars(answer) for answer in _going(folder, restore, rollback, published).plan()]
    return {
        "job": job,
        "lineage": None,
        "at_once": False,
        "outputs": answers,
        "command": _command(home, job, restore, rollback, published),
    }


def _going(folder: JobFolder, restore: str, rollback: str, published: str) -> Restore:
    choices = {"": published}
    if not restore:
        return Restore(folder, retained(folder, rollback), choices, f"rollback to {rollback}")
    # By its name alone: a path would let whoever looks read folders that are not the job's.
    cuts = Savepoints(folder).read(check_name("savepoint", restore)).cuts()
    return Restore(folder, cuts, choices, f"restore of {restore}")


def _command(home: Path, job: str, restore: str, rollback: str, published: str) -> str:
    what = ["restore", job, restore] if restore else ["rollback", job, "--to", rollback]
    return shlex.join(["onceflow", *what, "--published", published, "--home", str(home)])


def plans(home: Path, job: str, *, restore: str, rollback: str) -> list[Row]:
    """One for each choice; a refusal says why. `JobError` if all are refused for one reason."""
    found: list[Row] = []
    for choice in CHOICES:
        row: Row = {"choice": choice, "means": MEANS[choice], "refused": None, "hint": ""}
        try:
            row |= plan(home, job, restore=restore, rollback=rollback, published=choice)
        except BadRequest:
            raise
        except OnceflowError as error:
            row |= {"refused": error.message, "hint": error.hint}
        found.append(row)
    if all(row["refused"] == found[0]["refused"] is not None for row in found):
        raise JobError(found[0]["refused"], hint=found[0]["hint"])
    return found


def stop(home: Path, job: str) -> str:
    return shlex.join(["onceflow", "stop", job, "--home", str(home)])
