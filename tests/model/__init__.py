"""The epoch protocol as a model of which every reachable state is looked at: docs/model.md."""
