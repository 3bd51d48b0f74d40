"""The three jobs as they are, except that they keep few epochs: what is freed after hours is freed
within seconds."""

from __future__ import annotations

from dataclasses import replace

import ads.aggregation
import ads.attribution
import ads.load

_KEEP = 4

aggregation = replace(ads.aggregation.aggregation, keep_epochs=_KEEP)
attribution = replace(ads.attribution.attribution, keep_epochs=_KEEP)
load = replace(ads.load.load, keep_epochs=_KEEP)
