"""The version of onceflow, which documents that last are marked with."""

__version__ = "0.1.0"
