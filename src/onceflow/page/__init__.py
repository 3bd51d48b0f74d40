"""The web page of a home, its HTTP API and its metrics. It only reads files of the home.

Lives here: views, API, metrics, access. May not live here: anything that a job needs to run. Start
reading in `app.py`, then `home_reader.py`.
"""

from onceflow.contract.extras import require

require("page", "the page")
