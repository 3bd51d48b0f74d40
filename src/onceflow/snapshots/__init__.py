"""Snapshots that people name, move, return to and fork: savepoints, restores, lineages.

Lives here: reading and making cuts of a job, whether it runs or not. May not live here: starting a
job, commands. Start reading in `cut.py`, then `restore.py`.
"""
