"""Counters and histograms of the service itself, for Prometheus.

Each process collects sums and periodically adds them to the totals in the database, which every
process can read. Therefore, the metrics also cover loops that run in other processes, and restarts
don't reset them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from dray.views import JobState

COUNT: Final = "count"
SUM: Final = "sum"
"""Part of a metric that contains the sum of the observed values. The other parts are `COUNT` and
the upper bounds of the buckets."""
BEYOND: Final = "+Inf"

Cell = tuple[str, str, str]
"""(metric, label value, part)."""


@dataclass(frozen=True)
class ServiceMetric:
    """A counter or, if it has bounds, a histogram of durations."""

    name: str
    """Prometheus name, without `_total`."""
    help: str
    label: str | None = None
    values: tuple[str, ...] = ("",)
    """All possible label values."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of the buckets, in seconds."""

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The names of the buckets, in increasing order."""
        return (*(f"{bound:g}" for bound in self.bounds), BEYOND)


_SHORT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG = (0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)

SCHEDULER_ROUND = ServiceMetric(
    "dray_scheduler_round_seconds",
    "Duration of a scheduling round: read, plan, claim and launch.",
    bounds=_SHORT,
)
REPLY_DELAY = ServiceMetric(
    "dray_reply_delay_seconds",
    "Time from the arrival of a running job's reports until they are stored.",
    bounds=_SHORT,
)
JOB_WAIT = ServiceMetric(
    "dray_job_wait_seconds",
    "Time from the submission of a job until it first claims slots.",
    bounds=(1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 259200.0),
)
JOB_START = ServiceMetric(
    "dray_job_start_seconds",
    "Time from when an attempt claimed its slots until it was first seen training.",
    bounds=_LONG,
)
RECOVERY = ServiceMetric(
    "dray_recovery_seconds",
    "Time from a fault until the group or the next attempt is training again.",
    "how",
    ("in_place", "restart"),
    bounds=_LONG,
)
JOB_ENDS = ServiceMetric(
    "dray_job_ends",
    "Jobs that have ended, by final state.",
    "state",
    tuple(state.value for state in JobState if state.is_terminal),
)
WEBHOOK_TRIES = ServiceMetric(
    "dray_webhook_tries",
    "Messages sent to webhooks, including retries, by outcome.",
    "outcome",
    ("delivered", "failed"),
)

METRICS: Final = (
    *(SCHEDULER_ROUND, REPLY_DELAY, JOB_WAIT, JOB_START, RECOVERY),
    *(JOB_ENDS, WEBHOOK_TRIES),
)


class Meter:
    """This process's sums since the last `take`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cells: dict[Cell, float] = defaultdict(float)

    def add(self, metric: ServiceMetric, amount: float = 1.0, label: str = "") -> None:
        """Increment a counter, or add a duration in seconds to a histogram."""
        assert label in metric.values, f"{metric.name} has no label {label!r}"
        self.add_all(cells_of(metric, amount, label))

    def add_all(self, cells: Mapping[Cell, float]) -> None:
        with self._lock:
            for cell, amount in cells.items():
                self._cells[cell] += amount

    def take(self) -> dict[Cell, float]:
        """Return the sums, and reset them."""
        with self._lock:
            taken, self._cells = self._cells, defaultdict(float)
        return dict(taken)


def cells_of(metric: ServiceMetric, amount: float, label: str) -> dict[Cell, float]:
    if not metric.bounds:
        return {(metric.name, label, COUNT): amount}
    bucket = metric.parts[bisect_left(metric.bounds, amount)]
    return {(metric.name, label, bucket): 1.0, (metric.name, label, SUM): amount}
