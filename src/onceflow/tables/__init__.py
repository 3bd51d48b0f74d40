"""Tables of SQL databases: the part that all sinks for them share.

Lives here: code without a database client, and SQL that all databases understand. May not live
here: anything that is special to one database. Start reading in `sink.py`.
"""
