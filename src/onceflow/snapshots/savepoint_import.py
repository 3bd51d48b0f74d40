"""Make a job from a savepoint in a home that does not know it: on a new machine, or when the home
was lost.

The job keeps its targets. Their ledgers say how far it had come. Rows that they have beyond the
savepoint are taken back, or published once more. They cannot be skipped, because the decisions of
those epochs were in the other home.

1. lead and fence the targets: no driver of the other home can publish any longer
2. make the job, in a lineage that continues from the savepoint
3. move the targets into this lineage: no driver of the other home can come back. If the command is
   killed before that, the first start does it
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from onceflow.contract.abilities import can_rewind, clean_up_of, require_rewind
from onceflow.contract.ledger import Ledger, Position
from onceflow.errors import CheckpointRefused, Fenced, JobError
from onceflow.faults.points import reach
from onceflow.protocol.home import JobFolder
from onceflow.protocol.lease import Lease
from onceflow.protocol.lineage import Origin, OutputOrigin
from onceflow.snapshots.cut import Cut
from onceflow.snapshots.new_lineage import make_job, refuse_taken
from onceflow.snapshots.published_rows import Output, OutputPlan, choice_for, output_origin
from onceflow.snapshots.savepoint import Savepoint


class SavepointImport:
    """An import of a savepoint, planned and then run, like a `Restore`."""

    def __init__(self, folder: JobFolder, savepoint: Savepoint, choices: Mapping[str, str]) -> None:
        savepoint.refuse_other_job(folder.name)
        self._folder, self._savepoint, self._choices = folder, savepoint, choices

    def plan(self) -> list[OutputPlan]:
        refuse_taken(self._folder)
        found = []
        for query, output, cut in self._outputs():
            ledger = output.sink.published(f"{self._folder.name}/{query}/{output.name}")
            published = self._check(query, output, cut, ledger)
            found.append(OutputPlan.of(query, output, cut.epoch, published))
        return found

    def _outputs(self) -> Iterator[tuple[str, Output, Position]]:
        for query, targets in self._savepoint.body["outputs"].items():
            part = self._savepoint.body["queries"].get(query)
            if part is not None:
                for name, target in targets.items():
                    choice = choice_for(self._choices, query, name)
                    cut = Position(part["known"][name], part["epoch"])
                    yield query, Output.of(query, name, target, choice), cut

    def _check(self, query: str, output: Output, cut: Position, ledger: Ledger) -> int:
        """The last epoch that the target has, if the import is possible."""
        if not output.exact:
            return cut.epoch
        whole, at = f"{query}/{output.name}", ledger.position
        if at is None or at.epoch < cut.epoch:
            has = "nothing" if at is None else f"epoch {at.epoch}"
            raise CheckpointRefused(
                f"output {whole}: {output.sink} has {has} of the job, and the savepoint is of "
                f"epoch {cut.epoch}",
                hint="bring back the target as it was, or fork a job with new targets from the "
                "savepoint",
            )
        if at != cut and output.choice == "skip":
            raise JobError(
                f"output {whole}: {output.sink} has epochs after the savepoint, up to {at.epoch}, "
                "and this home does not know them, so they cannot be skipped",
                hint=f"--published {whole}=rewind, if the sink can",
            )
        taken_back = at.lineage != cut.lineage and can_rewind(output.sink)
        if at != cut and (output.choice == "rewind" or taken_back):
            require_rewind(output.sink).refuse_rewind(f"{self._folder.name}/{whole}", cut)
        return at.epoch

    def run(self, facts: Mapping[str, Any]) -> str:
        """Make the job, and return its lineage."""
        lease = Lease(self._folder.folder / "lease", self._folder.name)
        lease.acquire()
        try:
            self.plan()
            return self._run(lease, facts)
        finally:
            lease.release()

    def _run(self, lease: Lease, facts: Mapping[str, Any]) -> str:
        ids = {(q, o.name): f"{self._folder.name}/{q}/{o.name}" for q, o, _ in self._outputs()}
        seen = [o.sink.published(ids[q, o.name]).term for q, o, _ in self._outputs()]
        term, lineage = lease.next_term(max([0, *seen])), str(uuid.uuid4())
        outputs: dict[str, dict[str, OutputOrigin]] = {}
        for query, output, cut in self._outputs():
            whole, at, decision = ids[query, output.name], cut, ""
            if output.exact:
                clean_up_of(output.sink).shut_out(whole)
                ledger = output.sink.fence(whole, term=term, token=uuid.uuid4().hex)
                self._check(query, output, cut, ledger)
                at, decision = ledger.position or cut, ledger.decision
            stands = (at.lineage, at.epoch, decision)
            kept = output_origin(output.choice, cut.lineage, stands, cut.epoch)
            outputs.setdefault(query, {})[output.name] = kept
        reach("restore.fenced")
        origins = {
            query: (
                Origin(
                    lineage, of, cut.decision.epoch, cut.decision.nonce, of, outputs.get(query, {})
                ),
                cut,
            )
            for query, (of, cut) in self._savepoint.cuts().items()
        }
        reason = f"restore of {self._savepoint.name} on a new home"
        about = {"reason": reason, "outputs": self._savepoint.body["outputs"], **facts}
        starts = self._savepoint.body["starts"]
        make_job(self._folder, origins, starts, about=about, facts={})
        for query, output, _ in self._outputs():
            self._move_ledger(query, output, *origins[query], term)
        return lineage

    def _move_ledger(self, query: str, output: Output, origin: Origin, cut: Cut, term: int) -> None:
        decided = cut.decision.outputs.get(output.name)
        if not output.exact or decided is None:
            return
        whole = f"{self._folder.name}/{query}/{output.name}"
        ledger = output.sink.published(whole)
        try:
            origin.move_ledger(
                output.sink, whole, ledger, term=term, schema=decided.schema, mode=decided.mode
            )
        except Fenced as fenced:
            raise Fenced(
                f"{fenced.message}: the job runs elsewhere",
                hint=f"stop it there, remove {self._folder.folder}, and restore again",
            ) from fenced
