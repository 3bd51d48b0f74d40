"""What the author of a job calls: `@job`, `Flow`, `start`, `write`, and the handle of a job.

Lives here: the public way from a Python function to running queries. May not live here: processes
that watch drivers (see `service/`). Start reading in `flow.py`, then `start.py` and `handle.py`.
"""
