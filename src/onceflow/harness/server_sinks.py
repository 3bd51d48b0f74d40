"""Sinks of the built-in jobs that take both of their ways in turn. They are not in the job file: an
error that passes through it is taken for the job's own."""

from __future__ import annotations

import sys

from onceflow.contract.abilities import Staged
from onceflow.contract.ledger import Committable, Outcome, Publication
from onceflow.kafka.sink import Kafka as KafkaSink
from onceflow.postgres.sink import Postgres as PostgresSink


class Kafka(KafkaSink):
    """Every other epoch goes to two slots, by tasks; the others to one, by the driver."""

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        self.few_rows = 1 if self.few_rows > 1 else sys.maxsize
        return super().stage(staged)


class Postgres(PostgresSink):
    """Tasks copy every other epoch, apart; the driver copies the others."""

    def publish(self, publication: Publication) -> Outcome:
        Postgres.copied_apart_from = 1 if publication.epoch % 2 else sys.maxsize
        return super().publish(publication)
