"""A folder of immutable files with numbered commits: what the sinks `Files` and `Log` share.

Lives here: the commit log and how staged files move into a folder. May not live here: file formats
or offsets. Start reading in `commit_log.py`.
"""
