"""The web page of a home and its HTTP API; it reads files and starts nothing by itself.

Lives here: views, API, metrics, access. May not live here: anything that a job needs to run. Start
reading in `app.py`, then `watch.py`.
"""

from onceflow.contract.extras import require

require("page", "the page")
