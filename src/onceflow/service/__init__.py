"""The processes that keep a driver alive: supervisor, driver, journal, status.

Lives here: restarts, progress, error reports, the status of a home. May not live here: screens and
pages. Start reading in `supervisor.py`, then `driver.py`.
"""
