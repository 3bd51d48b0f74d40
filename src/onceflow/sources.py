"""Where rows come from."""

from onceflow.contract.source import Source
from onceflow.files.source import Files
from onceflow.kafka.source import Kafka
from onceflow.log.source import Log

__all__ = ["Files", "Kafka", "Log", "Source"]
