"""What a restore or a rollback would do, and the command that does it. Plans change nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from onceflow.errors import JobError, OnceflowError
from onceflow.page.errors import BadRequest
from onceflow.page.files import Row
from onceflow.page.shapes import Plan
from onceflow.protocol.home import JobFolder, select_jobs
from onceflow.protocol.lineage import CHOICES
from onceflow.snapshots.epochs import cuts_at
from onceflow.snapshots.restore import Restore
from onceflow.snapshots.savepoints import Savepoints
from onceflow.store.names import check_name

MEANS = {
    "rewind": "take them back where the target can",
    "skip": "leave them; compute their epochs again without publishing",
    "replay": "publish them again: duplicates",
}


def wanted(parameters: Mapping[str, str]) -> dict[str, str]:
    """What a plan is for, as a request has it."""
    return {key: parameters.get(key, "").strip() for key in ("restore", "rollback")}


def plan(home: Path, job: str, *, restore: str, rollback: str, published: str) -> Plan:
    """As `onceflow restore --plan --json`, and the command. `restore`: a savepoint of the job; or
    `rollback`: a retained epoch or a time. Raises if a target cannot do it."""
    folder = select_jobs(home, check_name("job", job))[0]
    if published not in CHOICES:
        raise BadRequest(f"{published!r} is not a choice", hint=f"one of {', '.join(CHOICES)}")
    if bool(restore) == bool(rollback):
        raise BadRequest(
            "a plan needs one of restore and rollback", hint="restore=SAVEPOINT, or rollback=EPOCH"
        )
    return {
        "job": job,
        "lineage": None,
        "at_once": False,
        "outputs": _restore(folder, restore, rollback, published).plan(),
        "command": _command(home, job, restore, rollback, published),
    }


def _restore(folder: JobFolder, restore: str, rollback: str, published: str) -> Restore:
    choices = {"": published}
    if not restore:
        return Restore(folder, cuts_at(folder, rollback), choices, f"rollback to {rollback}")
    # By name only: with a path, a viewer could read folders of other jobs.
    cuts = Savepoints(folder).read(check_name("savepoint", restore)).cuts()
    return Restore(folder, cuts, choices, f"restore of {restore}")


def _command(home: Path, job: str, restore: str, rollback: str, published: str) -> str:
    what = ["restore", job, restore] if restore else ["rollback", job, "--to", rollback]
    return shlex.join(["onceflow", *what, "--published", published, "--home", str(home)])


def plans(home: Path, job: str, *, restore: str, rollback: str) -> list[Row]:
    """One plan for each choice; a refused one tells why. `JobError` if all have one reason."""
    found: list[Row] = []
    for choice in CHOICES:
        row: Row = {"choice": choice, "means": MEANS[choice], "refused": None, "hint": ""}
        try:
            row |= {**plan(home, job, restore=restore, rollback=rollback, published=choice)}
        except BadRequest:
            raise
        except OnceflowError as error:
            row |= {"refused": error.message, "hint": error.hint}
        found.append(row)
    if all(row["refused"] == found[0]["refused"] is not None for row in found):
        raise JobError(found[0]["refused"], hint=found[0]["hint"])
    return found


def stop_command(home: Path, job: str) -> str:
    return shlex.join(["onceflow", "stop", job, "--home", str(home)])
