"""A folder of immutable files with numbered commits: the base of the sinks `Files` and `Log`.

Lives here: the commit log, and moving staged files into a folder. May not live here: file formats
or offsets. Start reading in `commit_log.py`.
"""
