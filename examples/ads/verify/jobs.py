"""The three jobs, except that they retain few epochs: old files are removed within seconds instead
of hours."""

from __future__ import annotations

from dataclasses import replace

import ads.aggregation
import ads.attribution
import ads.load

_KEEP = 4

aggregation = replace(ads.aggregation.aggregation, keep_epochs=_KEEP)
attribution = replace(ads.attribution.attribution, keep_epochs=_KEEP)
load = replace(ads.load.load, keep_epochs=_KEEP)
