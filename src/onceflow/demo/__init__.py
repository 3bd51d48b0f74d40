"""`onceflow demo`: a stream with known contents, a job that is killed, and the truth beside it."""
