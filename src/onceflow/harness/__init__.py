"""A job under faults, and a checker that trusts none of onceflow's own readers.

Lives here: workloads, the nemesis, driver processes, the reader, the checker, the report. May not
live here: anything that the product needs to run. Start reading in `runner.py`.
"""
