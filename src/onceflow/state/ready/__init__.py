"""Keyed processes that are ready to use; `onceflow.state` exports them.

Lives here: processes that need no code of the user. May not live here: anything that only they
could do. They are written as a user would write them, on `process.py` and `vectors.py`. Start
reading in `running.py`.
"""
