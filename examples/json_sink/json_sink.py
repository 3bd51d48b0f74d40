"""A sink of one JSON file, which only ever changes as a whole (docs/write-a-sink.md)."""

import os

import pyarrow.parquet as pq
from json_store import Store

from onceflow.contract.ledger import needs_rewind, refuse_older, staged_file_gone
from onceflow.contract.schema import columns, leaf_types, refuse_difference
from onceflow.errors import JobError, TargetBehind
from onceflow.sinks import CanRewind, Ledger, Outcome, Position, Sink, Verdict, judge


class JsonFile(Sink, CanRewind):
    """Every row of a decided epoch is in the file exactly once; readers see whole epochs only.

    It writes the whole file again for each epoch, so it is for small results.
    """

    shared = True  # several outputs may write into one file
    place = "path"

    def __init__(self, path):
        self.store = Store(path)

    def __str__(self):
        return f"JsonFile({str(self.store.path)!r})"

    def published(self, output):
        return self._ledger(self._said(self.store.load(), output))

    def fence(self, output, *, term, token):
        with self.store.change() as content:
            said = self._said(content, output)
            refuse_older(said["term"], term, self, is_ours=said["token"] == token)
            said |= {"term": term, "token": token}
        return self._ledger(said)

    def publish(self, publication):
        with self.store.change() as content:
            said = self._said(content, publication.output)
            if judge(self._ledger(said), publication, str(self)) is Verdict.ALREADY_PUBLISHED:
                return Outcome.ALREADY_PUBLISHED
            content["columns"] = columns(publication.schema)
            content["rows"] = self._merged(content["rows"], publication)
            said["lineages"][publication.lineage] = publication.epoch
            said["decision"] = publication.decision
        return Outcome.PUBLISHED

    def _merged(self, rows, publication):
        whose = [publication.output, publication.lineage, publication.epoch]
        return rows + [[*whose, row] for row in self._staged_rows(publication)]

    def _staged_rows(self, publication):
        for file in publication.files:
            if not os.path.exists(file.path):
                raise staged_file_gone(str(self), file.path, publication.epoch)
            yield from pq.ParquetFile(file.path).read().to_pylist()

    def _said(self, content, output):
        nothing = {"term": 0, "token": "", "lineages": {}, "decision": ""}
        return content["ledgers"].setdefault(output, nothing)

    def _ledger(self, said):
        positions = [Position(*item) for item in said["lineages"].items()]
        return Ledger(said["term"], positions[-1] if positions else None, said["decision"])

    def prepare(self, output, schema, mode):
        self.refuse_mode(mode)
        known = {"string", "boolean", "byte", "short", "integer", "long", "float", "double"}
        wrong = [name for name, kinds in leaf_types(schema).items() if not kinds <= known]
        if wrong:
            raise JobError(f"{self}: JSON has nothing for {', '.join(wrong)}", hint="cast it")
        have = self.store.load()["columns"]
        if have:
            refuse_difference(str(self), have, columns(schema))

    def refuse_rewind(self, output, cut):
        self._up_to(cut, self._said(self.store.load(), output)["lineages"])

    def rewind(self, output, *, cut, to, term, decision):
        with self.store.change() as content:
            said = self._said(content, output)
            if not needs_rewind(self._ledger(said), to, term=term, target=self):
                return
            kept = self._up_to(cut, said["lineages"])
            content["rows"] = [e for e in content["rows"] if self._stays(e, output, kept)]
            said |= {"lineages": {**kept, to.lineage: to.epoch}, "decision": decision}

    def _up_to(self, cut, lineages):
        if lineages.get(cut.lineage, -1) < cut.epoch:
            raise TargetBehind(f"{self} does not have epoch {cut.epoch} of {cut.lineage}")
        known = list(lineages)
        kept = known[: known.index(cut.lineage) + 1]
        return {lineage: min(lineages[lineage], cut.epoch) for lineage in kept}

    def _stays(self, entry, output, kept):
        owner, lineage, epoch, _ = entry
        return owner != output or epoch <= kept.get(lineage, -1)
