"""SQLite tables as a sink.

Lives here: the publishing transaction, the ledger, values and types. May not live here: code that
every SQL table needs (see `tables/`). Start reading in `sink.py`.
"""
