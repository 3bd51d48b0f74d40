"""Sinks for the contract's own tests: some that are right, and for each fault one that has it."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
from json_sink import JsonFile
from json_store import Store

from onceflow.contract.ledger import judge, staged_file_gone
from onceflow.contract.schema import columns
from onceflow.contract.staged_files import describe
from onceflow.errors import Fenced, PublishFailed, PublishUnknown, TargetForeign
from onceflow.sinks import (
    CanCleanUp,
    CanReadBack,
    CanStage,
    Committable,
    Ledger,
    Outcome,
    Position,
    Publication,
    Staged,
    Verdict,
)
from onceflow.store.posix import make_dirs, replace_file

# ---------------------------------------------------------------- right ones


class Plain(JsonFile):
    """The sink without its `rewind`: what is made of it has no tests of that."""

    no_rewind = "it is not tested"


class Owned(Plain, CanReadBack):
    """One output has the file to itself."""

    shared = False

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        if {*self.store.load()["ledgers"]} - {output}:
            raise TargetForeign(f"{self} belongs to another output")
        return super().fence(output, term=term, token=token)

    def read_back(self) -> list[dict[str, Any]]:
        return [{**entry[3], "_epoch": entry[2]} for entry in self.store.load()["rows"]]


class Keyed(JsonFile):
    """Upserts by `id` in update mode, replaces in complete mode.

    What an epoch replaces stays in the file, with the lineage and the epoch that replaced it.
    """

    modes = ("append", "update", "complete")

    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        added = self._of_one_key(super()._merged([], publication), publication)
        ids = {row["id"] for *_, row in added}
        by = [publication.lineage, publication.epoch]
        for entry in rows:
            if not entry[4:] and (publication.mode == "complete" or entry[3]["id"] in ids):
                entry.extend(by)
        return rows + added

    def _of_one_key(self, added: list[Any], publication: Publication) -> list[Any]:
        if publication.mode == "complete":
            return added
        return list({entry[3]["id"]: entry for entry in added}.values())

    def _stays(self, entry: list[Any], output: str, kept: dict[str, int]) -> bool:
        if entry[4:] and not super()._stays([entry[0], *entry[4:], None], output, kept):
            del entry[4:]
        return bool(super()._stays(entry[:4], output, kept))


class StagesInTarget(Plain, CanStage, CanCleanUp):
    """Copies what is staged to beside the file."""

    @property
    def _area(self) -> Path:
        return Path(f"{self.store.path}.staged")

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        folder = self._area / staged.tag
        make_dirs(folder)
        for file in staged.files:
            shutil.copy(file.path, folder)
        return describe(folder, ())

    def sweep(self, *, below_term: int) -> None:
        for folder in self._area.glob("*-*-*-*"):
            if int(folder.name.rsplit("-", 2)[1]) < below_term:
                shutil.rmtree(folder)


# ---------------------------------------------------------------- all or nothing


class _TwoFiles(Store):
    """Rows in one file, ledgers in another."""

    @property
    def _ledgers(self) -> Path:
        return Path(f"{self.path}.ledgers")

    def load(self) -> dict[str, Any]:
        content: dict[str, Any] = super().load()
        if self._ledgers.exists():
            content["ledgers"] = json.loads(self._ledgers.read_text())
        return content

    def save(self, content: dict[str, Any]) -> None:
        super().save(content)
        replace_file(self._ledgers, json.dumps(content["ledgers"]).encode())


class RowsBeforeLedger(Plain):
    def __init__(self, path: Path) -> None:
        self.store = _TwoFiles(path)


class ShowsHalfAnEpoch(Plain):
    """Whoever comes next removes it, so nothing of it stays."""

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        ledger: Ledger = super().fence(output, term=term, token=token)
        with self.store.change() as content:
            last = -1 if ledger.position is None else ledger.position.epoch
            content["rows"] = [e for e in content["rows"] if e[0] != output or e[2] <= last]
        return ledger

    def publish(self, publication: Publication) -> Outcome:
        with self.store.change() as content:
            ledger = self._ledger(self._said(content, publication.output))
            if judge(ledger, publication, str(self)) is Verdict.PUBLISH:
                rows = super()._merged([], publication)
                content["rows"] += rows[: len(rows) // 2]
        outcome: Outcome = super().publish(publication)
        return outcome

    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        whose = [publication.output, publication.lineage, publication.epoch]
        merged: list[Any] = super()._merged([e for e in rows if e[:3] != whose], publication)
        return merged


class CommitsEvery5(Plain):
    """Some rows at a time; the last ones with the ledger."""

    size = 5

    def publish(self, publication: Publication) -> Outcome:
        for first in range(0, max(publication.rows, 1), self.size):
            with self.store.change() as content:
                said = self._said(content, publication.output)
                if judge(self._ledger(said), publication, str(self)) is Verdict.ALREADY_PUBLISHED:
                    return Outcome.ALREADY_PUBLISHED
                rows = self._merged([], publication)
                content["columns"] = columns(publication.schema)
                content["rows"] += rows[first : first + self.size]
                if first + self.size >= len(rows):
                    said["lineages"][publication.lineage] = publication.epoch
                    said["decision"] = publication.decision
        return Outcome.PUBLISHED


class CommitsEvery1000(CommitsEvery5):
    size = 1000


# ---------------------------------------------------------------- errors of a commit


class _Catches(Plain):
    """Does something of its own when its commit fails."""

    def publish(self, publication: Publication) -> Outcome:
        try:
            outcome: Outcome = super().publish(publication)
        except OSError as error:
            return self.caught(error, publication)
        return outcome

    def caught(self, error: OSError, publication: Publication) -> Outcome:
        raise NotImplementedError


class TakesCommitErrorsForSuccess(_Catches):
    def caught(self, error: OSError, publication: Publication) -> Outcome:
        return Outcome.PUBLISHED


class TakesCommitErrorsForFailure(_Catches):
    def caught(self, error: OSError, publication: Publication) -> Outcome:
        raise PublishFailed(f"{self}: {error}") from error


class CleansUpAfterCommitErrors(_Catches):
    def caught(self, error: OSError, publication: Publication) -> Outcome:
        whose = [publication.output, publication.lineage, publication.epoch]
        with self.store.change() as content:
            content["rows"] = [entry for entry in content["rows"] if entry[:3] != whose]
        raise PublishUnknown(f"{self}: {error}") from error


class RetriesAfterCommitErrors(_Catches):
    def caught(self, error: OSError, publication: Publication) -> Outcome:
        with self.store.change() as content:
            said = self._said(content, publication.output)
            content["rows"] = self._merged(content["rows"], publication)
            said["lineages"][publication.lineage] = publication.epoch
            said["decision"] = publication.decision
        return Outcome.PUBLISHED


# ---------------------------------------------------------------- the ledger


class _Judges(Plain):
    """Publishes by another comparison than `judge`."""

    def seen(self, said: dict[str, Any], publication: Publication) -> tuple[Ledger, Publication]:
        """What it takes ledger and publication for."""
        raise NotImplementedError

    def publish(self, publication: Publication) -> Outcome:
        with self.store.change() as content:
            said = self._said(content, publication.output)
            if judge(*self.seen(said, publication), str(self)) is Verdict.ALREADY_PUBLISHED:
                return Outcome.ALREADY_PUBLISHED
            content["columns"] = columns(publication.schema)
            content["rows"] = self._merged(content["rows"], publication)
            said["lineages"][publication.lineage] = publication.epoch
            said |= {"decision": publication.decision, "by": publication.term}
        return Outcome.PUBLISHED


class ReadsTheLedgerFirst(Plain):
    """And then begins its transaction."""

    def publish(self, publication: Publication) -> Outcome:
        if judge(self.published(publication.output), publication, str(self)) is not Verdict.PUBLISH:
            return Outcome.ALREADY_PUBLISHED
        with self.store.change() as content:
            said = self._said(content, publication.output)
            content["columns"] = columns(publication.schema)
            content["rows"] = self._merged(content["rows"], publication)
            said["lineages"][publication.lineage] = publication.epoch
            said["decision"] = publication.decision
        return Outcome.PUBLISHED


class ForgetsOlderEpochs(_Judges):
    def seen(self, said: dict[str, Any], publication: Publication) -> tuple[Ledger, Publication]:
        ledger = self._ledger(said)
        at = ledger.position
        if at and at.lineage == publication.lineage and at.epoch > publication.epoch:
            return replace(ledger, position=publication.previous), publication
        return ledger, publication


class TakesOlderEpochsForPublished(_Judges):
    def seen(self, said: dict[str, Any], publication: Publication) -> tuple[Ledger, Publication]:
        ledger = self._ledger(said)
        at = ledger.position
        if at and at.lineage == publication.lineage and at.epoch > publication.epoch:
            return replace(ledger, term=publication.term), publication
        return ledger, publication


class KnowsOnlyWhatItPublishedItself(_Judges):
    def seen(self, said: dict[str, Any], publication: Publication) -> tuple[Ledger, Publication]:
        ledger = self._ledger(said)
        if ledger.position == publication.position and said["by"] != publication.term:
            return replace(ledger, position=publication.previous), publication
        return ledger, publication


class IgnoresTheDecision(_Judges):
    def seen(self, said: dict[str, Any], publication: Publication) -> tuple[Ledger, Publication]:
        return replace(self._ledger(said), decision=publication.decision), publication


class IgnoresTheTerm(_Judges):
    def seen(self, said: dict[str, Any], publication: Publication) -> tuple[Ledger, Publication]:
        return replace(self._ledger(said), term=0), publication


class IgnoresTheLineage(_Judges):
    def seen(self, said: dict[str, Any], publication: Publication) -> tuple[Ledger, Publication]:
        def known(position: Position | None) -> Position | None:
            return position and replace(position, lineage="")

        ledger = self._ledger(said)
        return replace(ledger, position=known(ledger.position)), replace(
            publication, lineage="", previous=known(publication.previous)
        )


class IgnoresGaps(_Judges):
    def seen(self, said: dict[str, Any], publication: Publication) -> tuple[Ledger, Publication]:
        ledger = self._ledger(said)
        if ledger.position and ledger.position.lineage == publication.lineage:
            return ledger, replace(publication, previous=ledger.position)
        return ledger, publication


class SkipsEmptyEpochs(Plain):
    def publish(self, publication: Publication) -> Outcome:
        published: Outcome = Outcome.PUBLISHED
        return super().publish(publication) if publication.files else published


class KeepsTheTermInMemory(Plain):
    _memory: ClassVar[dict[tuple[str, str], dict[str, Any]]] = {}

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        ledger: Ledger = super().fence(output, term=term, token=token)
        self._memory[str(self), output] = {"term": term, "token": token}
        return ledger

    def _said(self, content: dict[str, Any], output: str) -> dict[str, Any]:
        said: dict[str, Any] = super()._said(content, output)
        said |= self._memory.get((str(self), output), {"term": 0, "token": ""})
        return said


class HasOneLedger(Plain):
    def _said(self, content: dict[str, Any], output: str) -> dict[str, Any]:
        said: dict[str, Any] = super()._said(content, "all")
        return said


class TakesAnyOutput(Plain):
    shared = False


# ---------------------------------------------------------------- fencing


class _Fences(Plain):
    """Fences by another comparison."""

    def refuses(self, said: dict[str, Any], term: int, token: str) -> bool:
        raise NotImplementedError

    def fence(self, output: str, *, term: int, token: str) -> Ledger:
        with self.store.change() as content:
            said = self._said(content, output)
            if self.refuses(said, term, token):
                raise Fenced(f"{self} has seen term {said['term']}")
            said |= {"term": term, "token": token}
        ledger: Ledger = self._ledger(said)
        return ledger


class LetsLowerTermsFence(_Fences):
    def refuses(self, said: dict[str, Any], term: int, token: str) -> bool:
        return bool(said["term"] == term and said["token"] != token)


class IgnoresTheToken(_Fences):
    def refuses(self, said: dict[str, Any], term: int, token: str) -> bool:
        return bool(said["term"] > term)


class RefusesItsOwnFence(_Fences):
    def refuses(self, said: dict[str, Any], term: int, token: str) -> bool:
        return bool(said["term"] >= term)


class _Unlocked(Store):
    @contextmanager
    def change(self) -> Iterator[dict[str, Any]]:
        content = self.load()
        yield content
        self.save(content)


class TakesNoLock(Plain):
    def __init__(self, path: Path) -> None:
        self.store = _Unlocked(path)


# ---------------------------------------------------------------- before an epoch


class TakesOtherColumns(Plain):
    def prepare(self, output: str, schema: str, mode: str) -> None:
        self.refuse_mode(mode)


class TakesAnyMode(Plain):
    def prepare(self, output: str, schema: str, mode: str) -> None:
        super().prepare(output, schema, "append")


class CreatesTheFileWhenAsked(Plain):
    def published(self, output: str) -> Ledger:
        with self.store.change():
            ledger: Ledger = super().published(output)
        return ledger


class TellsItsPassword(Plain):
    password = "hunter2"

    def arguments(self) -> dict[str, Any]:
        return {"dsn": f"json://user:{self.password}@host/rows"}


# ---------------------------------------------------------------- staged files


class DescribesWrongly(StagesInTarget):
    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        return tuple(replace(file, crc32=0) for file in super().stage(staged))


class LeavesOutMissingFiles(Plain):
    def _staged_rows(self, publication: Publication) -> Iterator[Any]:
        there = tuple(file for file in publication.files if Path(file.path).exists())
        return super()._staged_rows(replace(publication, files=there))


class SweepsNothing(StagesInTarget):
    def sweep(self, *, below_term: int) -> None:
        pass


class SweepsEverything(StagesInTarget):
    def sweep(self, *, below_term: int) -> None:
        super().sweep(below_term=below_term + 1)


# ---------------------------------------------------------------- rows


class TurnsNullIntoText(Plain):
    def _staged_rows(self, publication: Publication) -> Iterator[Any]:
        for row in super()._staged_rows(publication):
            yield {name: "" if value is None else value for name, value in row.items()}


class KeepsTheFirst500(Plain):
    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        return rows + super()._merged([], publication)[:500]


class DropsEqualRows(Plain):
    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        known = {json.dumps(row) for *_, row in rows}
        for entry in super()._merged([], publication):
            if json.dumps(entry[3]) not in known:
                known.add(json.dumps(entry[3]))
                rows = [*rows, entry]
        return rows


class DropsRowsOfKnownNumbers(Plain):
    """It knows a row by its epoch and its number there; a second lineage has the same ones."""

    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        added: list[Any] = super()._merged([], publication)
        known = sum(entry[0] == publication.output and entry[2] == publication.epoch
                    for entry in rows)  # fmt: skip
        return rows + added[known:]


class ReadsTheFirstRowGroup(Plain):
    def _staged_rows(self, publication: Publication) -> Iterator[Any]:
        for file in publication.files:
            if not Path(file.path).exists():
                raise staged_file_gone(str(self), file.path, publication.epoch)
            yield from pq.ParquetFile(file.path).read_row_group(0).to_pylist()


class StopsAtAnEmptyFile(Plain):
    def _staged_rows(self, publication: Publication) -> Iterator[Any]:
        files = tuple(itertools.takewhile(lambda file: file.rows, publication.files))
        return super()._staged_rows(replace(publication, files=files))


class KeepsTheFirstOfAKey(Keyed):
    no_rewind = "it is not tested"

    def _of_one_key(self, added: list[Any], publication: Publication) -> list[Any]:
        return super()._of_one_key(added[::-1], publication)


class NeverFindsNull(Keyed):
    """In SQL, NULL equals nothing."""

    no_rewind = "it is not tested"

    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        null = [entry for entry in rows if entry[3]["id"] is None]
        found = [entry for entry in rows if entry[3]["id"] is not None]
        return null + super()._merged(found, publication)


class KeepsRowsWithoutNewOnes(Keyed):
    """In complete mode."""

    no_rewind = "it is not tested"

    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        return super()._merged(rows, publication) if publication.files else rows


class AddsInUpdateMode(Keyed):
    no_rewind = "it is not tested"

    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        added: list[Any] = JsonFile._merged(self, [], publication)
        return rows + added if publication.mode == "update" else super()._merged(rows, publication)


class AddsInCompleteMode(Keyed):
    no_rewind = "it is not tested"

    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        kept = rows if publication.mode == "complete" else []
        return kept + super()._merged([] if kept else rows, publication)


class ThrowsOldRowsAway(Plain, CanCleanUp):
    def tidy(self) -> None:
        with self.store.change() as content:
            newest = sorted({entry[2] for entry in content["rows"]})[-15:]
            content["rows"] = [entry for entry in content["rows"] if entry[2] in newest]


class ReadsBackTheLastEpoch(Owned):
    def read_back(self) -> list[dict[str, Any]]:
        rows = super().read_back()
        return [row for row in rows if row["_epoch"] == rows[-1]["_epoch"]]


# ---------------------------------------------------------------- rewind


class KeepsTheDecision(JsonFile):
    def rewind(self, output: str, **facts: Any) -> None:
        facts["decision"] = self.published(output).decision
        super().rewind(output, **facts)


class LeavesLaterLineages(JsonFile):
    def _stays(self, entry: list[Any], output: str, kept: dict[str, int]) -> bool:
        return entry[1] not in kept or super()._stays(entry, output, kept)


class LosesTrackOfEmptyLineages(JsonFile):
    """It looks for the cut among the rows."""

    def rewind(self, output: str, *, cut: Position, **facts: Any) -> None:
        rows = self.store.load()["rows"]
        self._found = any(entry[:2] == [output, cut.lineage] for entry in rows)
        super().rewind(output, cut=cut, **facts)

    def _stays(self, entry: list[Any], output: str, kept: dict[str, int]) -> bool:
        return not self._found or super()._stays(entry, output, kept)


class TakesBackTheRowsOfAll(JsonFile):
    def _stays(self, entry: list[Any], output: str, kept: dict[str, int]) -> bool:
        return super()._stays([output, *entry[1:]], output, kept)


class ForgetsWhatUpdatesReplaced(Keyed):
    mode = "update"

    def _merged(self, rows: list[Any], publication: Publication) -> list[Any]:
        merged = super()._merged(rows, publication)
        return [entry for entry in merged if not entry[4:] or publication.mode != self.mode]


class ForgetsWhatCompleteModeReplaced(ForgetsWhatUpdatesReplaced):
    mode = "complete"


class RewindsTwice(JsonFile):
    def _said(self, content: dict[str, Any], output: str) -> dict[str, Any]:
        said: dict[str, Any] = super()._said(content, output)
        if self._forget in said["lineages"]:
            del said["lineages"][self._forget]
        return said

    _forget = ""

    def rewind(self, output: str, *, to: Position, **facts: Any) -> None:
        self._forget = to.lineage
        super().rewind(output, to=to, **facts)
        self._forget = ""


class RemembersTheParent(_Judges):
    no_rewind = ""

    def seen(self, said: dict[str, Any], publication: Publication) -> tuple[Ledger, Publication]:
        ledger = self._ledger(said)
        if publication.lineage in said["lineages"]:
            at = Position(publication.lineage, said["lineages"][publication.lineage])
            return replace(ledger, position=at), publication
        return ledger, publication


class LetsOlderTermsRewind(JsonFile):
    def rewind(self, output: str, *, term: int, **facts: Any) -> None:
        super().rewind(output, term=self.published(output).term, **facts)


class RewindsAhead(JsonFile):
    """It believes that its own lineage has come to every cut of it."""

    def _up_to(self, cut: Position, lineages: dict[str, int]) -> dict[str, int]:
        own = list(lineages)[-1]
        known = {**lineages, own: cut.epoch} if own == cut.lineage else lineages
        kept: dict[str, int] = super()._up_to(cut, known)
        return kept


class RewindsToWhatIsGone(JsonFile):
    """It believes that older lineages still have all that they had."""

    def _up_to(self, cut: Position, lineages: dict[str, int]) -> dict[str, int]:
        older = cut.lineage in list(lineages)[:-1]
        known = {**lineages, cut.lineage: cut.epoch} if older else lineages
        kept: dict[str, int] = super()._up_to(cut, known)
        return kept


class _TwoSteps(Store):
    in_steps = False

    def save(self, content: dict[str, Any]) -> None:
        if self.in_steps:
            super().save({**self.load(), "rows": content["rows"]})
        super().save(content)


class RewindsInTwoSteps(JsonFile):
    def __init__(self, path: Path) -> None:
        self.store = _TwoSteps(path)

    def rewind(self, output: str, **facts: Any) -> None:
        self.store.in_steps = True
        super().rewind(output, **facts)
        self.store.in_steps = False
