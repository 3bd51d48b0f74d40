"""A job under faults, and a checker that uses none of onceflow's own readers.

Lives here: workloads, faults, driver processes, the reader of committed rows, the checker, the
report. May not live here: anything that the product needs to run. Start reading in
`case_runner.py`; `verification.py` runs all cases of `onceflow verify`.
"""
