"""What the sinks for tables of SQL databases share: keys, modes, images for a rewind.

Lives here: code without a database client. May not live here: SQL of one database. Start reading in
`rewind_history.py`.
"""
