"""Sinks of the built-in jobs, which publish by the driver and by tasks in turn. They are not in the
job file, because an error that passes through that file counts as an error of the job."""

from __future__ import annotations

import sys

from onceflow.contract.abilities import Staged
from onceflow.contract.ledger import Committable, Outcome, Publication
from onceflow.kafka.sink import Kafka as KafkaSink
from onceflow.postgres.sink import Postgres as PostgresSink


class Kafka(KafkaSink):
    """Tasks publish every other epoch, to two slots; the driver publishes the others, to one."""

    def stage(self, staged: Staged) -> tuple[Committable, ...]:
        self.few_rows = 1 if self.few_rows > 1 else sys.maxsize
        return super().stage(staged)


class Postgres(PostgresSink):
    """Tasks copy every other epoch; the driver copies the others."""

    def publish(self, publication: Publication) -> Outcome:
        Postgres.copied_apart_from = 1 if publication.epoch % 2 else sys.maxsize
        return super().publish(publication)
