"""Tables of SQL databases: what every sink for one shares.

Lives here: code without a database client, and SQL that is the same in all of them. May not live
here: what one database does in its own way. Start reading in `sink.py`.
"""
