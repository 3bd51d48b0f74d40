"""Where rows come from."""

from onceflow.sources.base import Source
from onceflow.sources.files import Files
from onceflow.sources.kafka import Kafka
from onceflow.sources.log import Log

__all__ = ["Files", "Kafka", "Log", "Source"]
