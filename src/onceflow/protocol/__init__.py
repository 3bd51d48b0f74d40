"""The epoch protocol: how each effect of a query happens exactly once.

Lives here: one epoch from check to sweep, the epoch log, staging, recovery, leases, lineages. May
not live here: a job's syntax, commands, or code of one system. Start reading in `epoch.py`.
"""
