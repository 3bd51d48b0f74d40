"""Snapshots that people name, move, return to and fork: savepoints, restores, lineages.

Lives here: what reads and makes cuts of a job that stands still or runs. May not live here:
starting a job, commands. Start reading in `cut.py`, then `restore.py`.
"""
