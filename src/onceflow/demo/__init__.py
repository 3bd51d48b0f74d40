"""`onceflow demo`: the ads application under kill -9, with the expected result beside every output.

Lives here: the play and its processes. May not live here: the application itself (`examples/ads`).
Start reading in `play.py`.
"""
