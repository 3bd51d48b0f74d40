"""Wrong protocols, to see that `onceflow verify` and the contract of sinks notice. Each takes one
sentence of the protocol away.

`environment(name)`, in the environment of a driver or a command of `onceflow verify`, installs
the mutant of that name for as long as it lives.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

MUTANTS: dict[str, Callable[[], None]] = {}

_replaced: list[tuple[Any, str, Any]] = []


def environment(mutant: str) -> dict[str, str]:
    """What processes of `onceflow verify` need to run a wrong protocol."""
    return {"ONCEFLOW_VERIFY_WITHIN": f"{__file__}:asked_for", "ONCEFLOW_MUTANT": mutant}


@contextmanager
def asked_for() -> Iterator[None]:
    """The mutant that the environment names, or none."""
    name = os.environ.get("ONCEFLOW_MUTANT")
    with installed(name) if name else nullcontext():
        yield


@contextmanager
def installed(mutant: str) -> Iterator[None]:
    MUTANTS[mutant]()
    try:
        yield
    finally:
        while _replaced:
            setattr(*_replaced.pop())


def _mutant(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def listed(install: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[name] = install
        return install

    return listed


def _put(where: Any, **what: Any) -> None:
    for name, value in what.items():
        _replaced.append((where, name, getattr(where, name)))
        setattr(where, name, value)


@_mutant("publish-before-deciding")
def _publish_before_deciding() -> None:
    from onceflow.protocol.epoch import Epochs
    from onceflow.protocol.epoch_log import EpochLog

    decide, publish = EpochLog.decide, Epochs._publish
    put_off: list[Any] = []

    def later(_: EpochLog, decision: Any) -> None:
        put_off.append(decision)

    def first(self: Epochs, name: str, sink: Any, decision: Any) -> None:
        publish(self, name, sink, decision)
        if put_off and name == list(self.spec.outputs)[-1]:
            decide(self.log, put_off.pop())

    _put(EpochLog, decide=later)
    _put(Epochs, _publish=first)


@_mutant("skip-the-ledger")
def _skip_the_ledger() -> None:
    _judge_by(lambda ledger, publication, target: True)


@_mutant("ignore-the-term")
def _ignore_the_term() -> None:
    """In the ledgers and in the epoch log."""
    from dataclasses import replace

    from onceflow.contract.ledger import Verdict, judge
    from onceflow.protocol.epoch_log import EpochLog

    _judge_by(
        lambda ledger, publication, target: (
            judge(replace(ledger, term=0), publication, target) is Verdict.PUBLISH
        )
    )

    def check(self: EpochLog) -> None:
        self._log.catch_up(self._view)

    _put(EpochLog, check=check)


def _judge_by(continues: Callable[[Any, Any, str], bool]) -> None:
    from onceflow.contract.ledger import Verdict
    from onceflow.folders import commit_log as commits
    from onceflow.tables import sink as tables

    def judge(ledger: Any, publication: Any, target: str) -> Verdict:
        publishes = continues(ledger, publication, target)
        return Verdict.PUBLISH if publishes else Verdict.ALREADY_PUBLISHED

    _put(commits, judge=judge)
    _put(tables, judge=judge)


@_mutant("ledger-in-another-transaction")
def _ledger_in_another_transaction() -> None:
    from onceflow.contract.ledger import Outcome, Publication, Verdict, judge
    from onceflow.faults.points import reach
    from onceflow.sqlite.sink import Sqlite

    def publish(self: Sqlite, publication: Publication) -> Outcome:
        with self._database.writing() as db:
            ledger = self._ledger.read(db, publication.output)
            if judge(ledger, publication, str(self)) is Verdict.ALREADY_PUBLISHED:
                return Outcome.ALREADY_PUBLISHED
            self._write(db, publication, None)
        reach("sqlite.written")
        with self._database.writing() as db:
            db.execute(
                "UPDATE _onceflow_ledger SET lineage = ?, epoch = ?, decision = ? WHERE output = ?",
                (publication.lineage, publication.epoch, publication.decision, publication.output),
            )
        return Outcome.PUBLISHED

    _put(Sqlite, publish=publish)


@_mutant("drop-a-partition")
def _drop_a_partition() -> None:
    from dataclasses import replace

    from onceflow.protocol.compute import EpochCompute, EpochResult

    run = EpochCompute.run

    def dropped(self: EpochCompute, *args: Any, **how: Any) -> EpochResult:
        result = run(self, *args, **how)
        return replace(result, staged={name: files[1:] for name, files in result.staged.items()})

    _put(EpochCompute, run=dropped)


@_mutant("sweep-a-decided-file")
def _sweep_a_decided_file() -> None:
    from onceflow.protocol.epoch import Epochs

    publish_last = Epochs._publish_last

    def swept(self: Epochs) -> None:
        self._sweep_staged()
        publish_last(self)

    _put(Epochs, _publish_last=swept)


@_mutant("sweep-before-fencing")
def _sweep_before_fencing() -> None:
    from onceflow.protocol.epoch import Epochs

    refuse = Epochs._refuse_other_columns

    def swept(self: Epochs) -> None:
        refuse(self)
        outputs = self.log.last.outputs.values() if self.log.last else ()
        decided = [self._staged(file) for output in outputs for file in output.files]
        for folder in self.query.staged.glob("*-*-*-*"):
            if not any(path.is_relative_to(folder) for path in decided):
                shutil.rmtree(folder, ignore_errors=True)

    _put(Epochs, _refuse_other_columns=swept)


@_mutant("no-fence-entry")
def _no_fence_entry() -> None:
    from onceflow.protocol.epoch_log import EpochLog

    def fence(self: EpochLog, term: int, facts: dict[str, Any]) -> None:
        self._log.catch_up(self._view)
        self._term = self._view.term = term
        self._ours = self._view.position

    _put(EpochLog, fence=fence)


@_mutant("evaluate-again")
def _evaluate_again() -> None:
    """Recovery publishes what was decided and lets Spark run the epoch again for its state."""
    from onceflow.protocol.epoch import Epochs

    _leave_spark_alone()
    run = Epochs._run

    def again(self: Epochs, batch: Any, epoch: int) -> None:
        if epoch <= self._last_epoch:
            batch.write.format("noop").mode("overwrite").save()
        else:
            run(self, batch, epoch)

    _put(Epochs, _run=again)


@_mutant("decision-without-offsets")
def _decision_without_offsets() -> None:
    """An epoch whose number is decided is taken for done, whatever range Spark planned for it."""
    from onceflow.protocol.epoch import Epochs
    from onceflow.protocol.epoch_log import Decision

    _leave_spark_alone()
    run = Epochs._run

    def by_number(self: Epochs, batch: Any, epoch: int) -> None:
        if epoch > self._last_epoch:
            _forget_start(self.log.last)
            run(self, batch, epoch)

    def _forget_start(last: Decision | None) -> None:
        if last is not None:
            object.__setattr__(last, "end", _Anything())

    _put(Epochs, _run=by_number)


class _Anything(dict[str, Any]):
    """Equal to whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None


def _leave_spark_alone() -> None:
    from onceflow.protocol.checkpoint_repair import CheckpointRepair

    _put(CheckpointRepair, repair=lambda self: None)


@_mutant("prune-without-a-roll-up")
def _prune_without_a_roll_up() -> None:
    from onceflow.protocol.epoch_log import EpochLog

    def prune(self: EpochLog, *, keep: int, slack: int) -> bool:
        decisions = self._view.decisions
        for number in range(1, decisions[-keep - 1][0] if len(decisions) > keep + slack else 1):
            self._log.store.delete(self._log.entry_name(number))
        return False

    _put(EpochLog, roll_up=prune)


@_mutant("ledger-to-the-last-stable-offset")
def _ledger_to_the_last_stable_offset() -> None:
    """Kafka's ledger is read as far as any reader of committed records comes at once."""
    from onceflow.kafka.client import Cluster

    ends = Cluster.ends

    def stable_ends(self: Cluster, topic: str, partitions: Any, *, stable: bool) -> dict[int, int]:
        return ends(self, topic, partitions, stable=True)

    _put(Cluster, ends=stable_ends)


@_mutant("slots-changed-between-decision-and-publish")
def _slots_changed_between_decision_and_publish() -> None:
    """The publisher chooses the slots of an epoch's files; one slot after the other."""
    from onceflow.kafka import sink as kafka
    from onceflow.kafka.sink import Kafka

    publish = Kafka.publish

    def chosen_again(self: Kafka, publication: Any) -> Any:
        def by_slot(files: Any) -> dict[int, list[Any]]:
            found: dict[int, list[Any]] = {slot: [] for slot in range(self.slots)}
            for n, file in enumerate(files):
                found[(n + publication.term) % self.slots].append(file)
            return found

        _put(kafka, _by_slot=by_slot)
        return publish(self, publication)

    _put(Kafka, publish=chosen_again)
    _put(kafka, _session=lambda: None)


@_mutant("copy-trusted-after-a-server-crash")
def _copy_trusted_after_a_server_crash() -> None:
    """Nobody counts what tasks have copied to PostgreSQL."""
    from onceflow.postgres.copy import Apart
    from onceflow.postgres.table import TAG

    def trusted(self: Apart, _db: Any, _target: str) -> str:
        tags = ", ".join(str(tag) for tag, _ in self.parts)
        return f"(SELECT * FROM {self.table} WHERE {TAG} IN ({tags})) AS copies"

    _put(Apart, complete=trusted)


@_mutant("ledger-compared-by-number-only")
def _ledger_compared_by_number_only() -> None:
    """An epoch whose number the ledger has counts as published, whatever driver decided it."""
    from onceflow.contract.ledger import Verdict, judge
    from onceflow.folders import commit_log as commits
    from onceflow.kafka import sink as kafka
    from onceflow.kafka import slot as kafka_slots
    from onceflow.postgres import sink as postgres
    from onceflow.tables import sink as tables

    def by_number(ledger: Any, publication: Any, target: str) -> Verdict:
        if ledger.position is not None and ledger.position.epoch >= publication.epoch:
            return Verdict.ALREADY_PUBLISHED
        return judge(ledger, publication, target)

    for module in (commits, kafka, kafka_slots, postgres, tables):
        _put(module, judge=by_number)


# ---------------------------------------------------------------- snapshots


@_mutant("rewind-the-ledger-only")
def _rewind_the_ledger_only() -> None:
    """A lineage that continues from a cut moves the ledgers there, and takes no row back."""
    from dataclasses import replace

    from onceflow.protocol.lineage import Origin

    move_ledger = Origin.move_ledger

    def moved(self: Origin, sink: Any, output: str, ledger: Any, **how: Any) -> Any:
        stays = {name: replace(stood, choice="replay") for name, stood in self.outputs.items()}
        return move_ledger(replace(self, outputs=stays), sink, output, ledger, **how)

    _put(Origin, move_ledger=moved)


@_mutant("skip-and-publish-again")
def _skip_and_publish_again() -> None:
    """Epochs that were to be skipped are published like any other."""
    from onceflow.protocol.lineage import Origin

    _rewind_the_ledger_only()
    _put(Origin, last_of=lambda self, output: self.cut)


@_mutant("restore-before-publishing")
def _restore_before_publishing() -> None:
    """A restore ends the lineage without publishing what it decided last."""
    from onceflow.snapshots.restore import Restore

    _put(Restore, _publish=lambda self, going, output, term: None)


# ---------------------------------------------------------------- keyed state


@_mutant("drop-a-run")
def _drop_a_run() -> None:
    """A manifest does not name what one of the tasks has written."""
    from onceflow.state.manifest import Manifest

    advance = Manifest.advance

    def dropped(self: Manifest, epoch: int, added: Any, *merged: Any) -> Manifest:
        return advance(self, epoch, list(added)[1:], *merged)

    _put(Manifest, advance=dropped)


@_mutant("state-of-the-newest-manifest")
def _state_of_the_newest_manifest() -> None:
    """State is what was written last, whether it was decided or not."""
    from onceflow.protocol.keyed_runner import KeyedRunner
    from onceflow.state.manifest import Manifest

    def newest(self: KeyedRunner, step: Any, *_: Any) -> Manifest:
        found = sorted(self._folder(step).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return Manifest.read(found[-1]) if found else Manifest(-1, step.groups)

    _put(KeyedRunner, _manifest=newest, sweep=lambda *_, **__: None)
