"""The interfaces of sources, sinks, ledgers and staged files: all that a third party imports.

Lives here: the interfaces, schemas and values that cross from one room to another. May not live
here: a system (Kafka, PostgreSQL, ...) or Spark. Start reading in `sink.py`, then `ledger.py`.
"""
