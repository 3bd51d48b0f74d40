"""All that knows how Spark works inside: sessions, jars, checkpoint files, plans, state files.

Lives here: JVM calls, Spark's file names and formats, its settings. May not live here: the epoch
protocol or a system. Start reading in `session.py`, then `running_query.py`.
"""
