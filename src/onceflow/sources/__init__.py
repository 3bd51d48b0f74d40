"""Where rows come from."""

from onceflow.sources.base import Source
from onceflow.sources.files import Files
from onceflow.sources.log import Log

__all__ = ["Files", "Log", "Source"]
