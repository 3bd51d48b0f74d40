"""Where rows come from."""

from onceflow.sources.base import Source
from onceflow.sources.files import Files

__all__ = ["Files", "Source"]
