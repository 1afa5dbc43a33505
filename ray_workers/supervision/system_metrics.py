"""Copies system metrics from the nodes' observations to the supervisor's reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from ray_workers.shared.supervisor_frames import SystemMetricsColumns, SystemMetricsReport
from ray_workers.supervision.reporter import Reporter

EARLY = 0.1
"""Fraction of the period by which a sample can be early. Without this tolerance, a sample would
often have to wait for another observation."""

Sample = Mapping[int, Mapping[str, float]]
"""Values of the system metrics, by rank and name."""


def boot_time() -> float:
    """Return the number of seconds since boot. Unlike the system clock, this clock can't be set.
    This clock also advances while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SystemMetricsReporter:
    """Requests and reports the samples of one attempt.

    Samples are included in the observations of the ranks, so they require no separate calls. The
    times of the samples always increase, even if the node's clock is set back.
    """

    def __init__(
        self,
        reporter: Reporter,
        period_s: float | None,
        clock: Callable[[], float] = boot_time,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`period_s` is the number of seconds between samples; None disables them."""
        self._reporter = reporter
        self._period_s = period_s
        self._clock = clock
        self._epoch = wall_clock() - clock()
        self._asked_at: float | None = None
        self._is_wanted = False

    def ask(self) -> None:
        """Request a sample with the next observation, if a sample is due."""
        if self._period_s is None:
            return
        now = self._clock()
        least_s = self._period_s * (1 - EARLY)
        if self._asked_at is None or now - self._asked_at >= least_s:
            self._asked_at = now
            self._is_wanted = True

    def take_wish(self) -> bool:
        """Return whether a sample was requested with the next observation, and clear the
        request."""
        is_wanted, self._is_wanted = self._is_wanted, False
        return is_wanted

    def report(self, samples: Iterable[Sample]) -> None:
        """Report the nodes' samples, if any ranks are running."""
        alike: dict[tuple[str, ...], dict[int, Mapping[str, float]]] = {}
        for sample in samples:
            for rank, values in sample.items():
                alike.setdefault(tuple(values), {})[rank] = values
        columns = [
            SystemMetricsColumns(
                list(ranks),
                {name: [values[name] for values in ranks.values()] for name in names},
            )
            for names, ranks in alike.items()
            if names
        ]
        if columns:
            self._reporter.report(SystemMetricsReport(round(self._epoch + self._clock()), columns))
