"""`onceflow demo`: the ads application under kill -9, with the expected result beside every output.

Lives here: the run of the demo, and whom it kills. May not live here: the application itself
(`examples/ads`), or what `harness` has. Start reading in `run.py`.
"""
