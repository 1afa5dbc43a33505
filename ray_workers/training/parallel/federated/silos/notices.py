"""Reports of a round that is open for long: people then ask for whom the job waits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ray_workers.shared.frames import SiloRoundReport

NOTICE_S: Final = 5.0
"""A round that is over sooner is not reported, and one that is open is no more often than this."""


class RoundNotices:
    """Reports an open round, then the silos that have answered since, and its end."""

    def __init__(self, report: Callable[[SiloRoundReport], object]) -> None:
        self._report = report
        self._told: SiloRoundReport | None = None
        """The newest report of the open round."""
        self._not_before = math.inf

    def begin(self, now: float) -> None:
        """A round opens."""
        self._not_before = now + NOTICE_S

    def look(self, found: SiloRoundReport, now: float) -> None:
        """found: the open round as it is."""
        is_news = self._told is None or found.missing != self._told.missing
        if is_news and now >= self._not_before:
            self._report(found)
            self._told, self._not_before = found, now + NOTICE_S

    def end(self) -> None:
        """The round is over."""
        if self._told is not None:
            self._report(replace(self._told, missing=[]))
            self._told = None
