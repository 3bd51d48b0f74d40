"""Check that a checkpoint, a home and a target belong together.

onceflow refuses a checkpoint that was deleted, copied, swapped or set back, and a target with
another history, before it publishes anything. Each would otherwise lose or double rows.
"""

from __future__ import annotations

from onceflow.contract.ledger import Ledger
from onceflow.errors import CheckpointRefused
from onceflow.protocol.epoch_log import Decision
from onceflow.protocol.home import Query
from onceflow.spark.checkpoint import Checkpoint

_RESTORE = "put it back from a backup of the home, or start the job under a new home"


def refuse_other_checkpoint(query: Query, last: Decision | None, checkpoint: Checkpoint) -> None:
    """Refuse a Spark checkpoint that this lineage has not written."""
    found, decided = checkpoint.query_id(), _epoch(last)
    if found is not None and found != query.spark_id:
        raise CheckpointRefused(
            f"the checkpoint in {query.folder} is of another query (Spark id {found}, expected "
            f"{query.spark_id}): it was copied or swapped",
            hint=_RESTORE,
        )
    if found is None and last is not None:
        raise CheckpointRefused(
            f"the Spark checkpoint in {query.folder} was deleted", hint=_RESTORE
        )
    beyond = [n for n in checkpoint.committed() if n > decided]
    if beyond:
        raise CheckpointRefused(
            f"Spark committed epoch {beyond[-1]} in {query.folder}, but the last decision in the "
            f"epoch log is {_show(decided)}: entries of the log are missing",
            hint=_RESTORE,
        )
    if found is None:
        checkpoint.set_query_id(query.spark_id)


def refuse_foreign_ledger(query: Query, last: Decision | None, ledger: Ledger, what: str) -> None:
    """Refuse a target whose ledger names an epoch that this home has not decided."""
    at = ledger.position
    if at is None:
        return
    if at.lineage != query.lineage:
        raise CheckpointRefused(
            f"{what}: the target remembers epoch {at.epoch} of lineage {at.lineage}, but this "
            f"home has lineage {query.lineage}: the home was deleted, or it is another one",
            hint="bring back the home that wrote it, or write to a new target",
        )
    copied = last is not None and at.epoch == last.epoch and ledger.decision != last.nonce
    if at.epoch > _epoch(last) or copied:
        raise CheckpointRefused(
            f"{what}: the target has epoch {at.epoch}, which this home did not decide (it decided "
            f"up to {_show(_epoch(last))}): the home was set back, or is a copy",
            hint="bring back the newest home, or write to a new target",
        )


def _epoch(last: Decision | None) -> int:
    return -1 if last is None else last.epoch


def _show(epoch: int) -> str:
    return "nothing" if epoch < 0 else f"epoch {epoch}"
