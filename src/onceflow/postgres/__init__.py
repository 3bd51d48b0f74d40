"""PostgreSQL tables as a sink.

Lives here: the connection, the publishing transaction, the ledger, values and types. May not live
here: what every SQL table needs (see `tables/`). Start reading in `sink.py`.
"""
