"""What a job's author calls: `@job`, `Flow`, `start`, `write`, and the handle of a running job.

Lives here: the public way from a Python function to running queries. May not live here: processes
that watch over drivers (see `service/`). Start reading in `flow.py`, then `handle.py`.
"""
