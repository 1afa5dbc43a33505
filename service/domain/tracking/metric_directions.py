"""Whether lower or higher values of a metric are better."""

from __future__ import annotations

import re

from dray.spec.sweep import LESS_IS_BETTER

WORDS = frozenset(
    {"loss", "error", "err", "perplexity", "ppl", "mae", "mse", "rmse", "nll", "wer", "cer"}
)
"""Words that occur in the names of metrics for which lower values are better. The web page has the
same words: api/page/static/lib/directions.js."""


def is_minimised(metric: str) -> bool:
    """Whether lower values are better, according to the metric's name. A sweep that states the
    `mode` of its metric decides for its trials instead."""
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", metric).lower())
    return metric in LESS_IS_BETTER or not WORDS.isdisjoint(words)
