"""Kafka, as a source and as a sink.

Lives here: one client, its settings and errors, the source, the sink with its slots and its ledger.
May not live here: another system. Start reading in `sink.py`, then `slot.py`.
"""
