"""Snapshots that people name, move, go back to and fork: savepoints, restores, lineages."""
