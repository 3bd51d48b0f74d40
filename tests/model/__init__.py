"""A model of the epoch protocol. An explorer checks every reachable state: docs/model.md."""
