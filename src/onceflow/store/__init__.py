"""Bytes that last: put-if-absent, sealed documents, fsync.

Lives here: what writes and reads durable files. May not live here: anything that knows epochs, rows
or Spark. Start reading in `posix.py`.
"""
