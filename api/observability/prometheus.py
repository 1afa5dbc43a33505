"""Prometheus metrics. Requests are counted when they have been processed; all other metrics are
read from the database at each scrape.

A scrape needs a few SQL statements, regardless of the number of jobs. The number of series is
bounded: queues are the only labels with user-defined names, and only admins create queues.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from dray import views
from dray.views import JobState
from ray_workers.shared.heartbeat import TimeCategory
from service.domain.meter import COUNT, METRICS, SUM, Cell, ServiceMetric
from service.loops.metering import Watched
from service.runtime import Runtime

WORKER_KINDS = ("CPU", "GPU")

Labels = TypeVar("Labels", bound=tuple[str, ...])
"""Values of the labels of a family."""


class Scrape(Collector):
    """Holds the metrics read at a scrape; empty until the first scrape."""

    def __init__(self) -> None:
        self.families: list[Family] = []

    def collect(self) -> Iterator[Family]:
        yield from self.families


class Telemetry:
    """The metrics of one application, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "dray_http_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "dray_http_request_seconds",
            "Time to respond to a request. Long polls and streams are slow by design.",
            ("method", "route"),
            registry=self.registry,
        )
        self._scrape = Scrape()
        self.registry.register(self._scrape)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    async def render(self, runtime: Runtime) -> bytes:
        """Return all metrics in Prometheus' text format."""
        counts = await runtime.queries.count_jobs()
        cluster = await runtime.queries.cluster()
        slot_seconds = await runtime.faults.slot_seconds()
        watched = await runtime.metering.watched()
        self._scrape.families = families(counts, cluster, slot_seconds, watched)
        return generate_latest(self.registry)


def families(
    counts: Mapping[JobState, int],
    cluster: views.Cluster,
    slot_seconds: Mapping[str, float],
    watched: Watched,
) -> list[Family]:
    """Return the metrics of the whole service, which every API process exports."""
    return [
        *_of_jobs(counts),
        *_of_queues(watched),
        *_of_cluster(cluster, watched.now),
        *_of_webhooks(watched),
        _slot_seconds(slot_seconds),
        *(_of_meter(metric, watched.cells) for metric in METRICS),
    ]


def _gauge(
    name: str, help_: str, values: Mapping[Labels, float], *labels: str
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_, labels=labels)
    for label_values, value in values.items():
        family.add_metric(label_values, value)
    return family


def _of_jobs(counts: Mapping[JobState, int]) -> Iterator[Family]:
    by_state = {(state.value,): counts.get(state, 0) for state in JobState}
    yield _gauge("dray_jobs", "Jobs by state.", by_state, "state")
    waiting = {(): counts.get(JobState.QUEUED, 0)}
    yield _gauge("dray_queue_depth", "Jobs waiting for slots.", waiting)


def _of_queues(watched: Watched) -> Iterator[Family]:
    numbers = {(row.queue, row.state.value): row.num_jobs for row in watched.queues}
    yield _gauge(
        "dray_queue_jobs",
        "Jobs that have not ended, by queue and state.",
        numbers,
        *("queue", "state"),
    )
    ages = {
        (row.queue,): _age_s(row.first_at, watched.now)
        for row in watched.queues
        if row.state is JobState.QUEUED
    }
    yield _gauge(
        "dray_queue_oldest_seconds",
        "Time since the oldest waiting job of a queue was submitted, or since its begin time. Held "
        "jobs, and jobs that wait for other jobs or for their begin times, do not count.",
        ages,
        "queue",
    )


def _of_cluster(cluster: views.Cluster, now: datetime) -> Iterator[Family]:
    yield _gauge("dray_cluster_connected", "1 while Ray responds.", {(): float(cluster.connected)})
    yield _gauge(
        "dray_cluster_seen_seconds",
        "Time since the service last read the state of the cluster.",
        {(): _age_s(cluster.updated_at, now)},
    )
    alive = [node for node in cluster.nodes if node.alive]
    yield _gauge(
        "dray_nodes",
        "Live nodes, by whether dray accepts them.",
        {
            (str(accepted).lower(),): sum(node.accepted is accepted for node in alive)
            for accepted in (True, False)
        },
        "accepted",
    )
    usable = [node for node in alive if node.accepted]
    amounts = {}
    for kind in WORKER_KINDS:
        amounts[kind, "total"] = sum(node.resources.get(kind, 0.0) for node in usable)
        amounts[kind, "held"] = sum(node.held.get(kind, 0.0) for node in usable)
    yield _gauge(
        "dray_resources",
        "Ray resources of accepted nodes: in total, and held by attempts.",
        amounts,
        *("kind", "what"),
    )
    quarantined = sum(each.slots for node in alive for each in node.quarantined)
    yield _gauge(
        "dray_quarantined_slots",
        "Slots that are withheld until all processes of the last job on them have ended.",
        {(): quarantined},
    )
    yield _gauge(
        "dray_storage_full",
        "1 while the storage is full and jobs are neither accepted nor started, otherwise 0.",
        {(): float(cluster.storage.problem is not None)},
    )


def _of_webhooks(watched: Watched) -> Iterator[Family]:
    enabled, failing, disabled, waiting, oldest_at = watched.webhooks
    yield _gauge(
        "dray_webhooks",
        "Webhooks by state.",
        {("enabled",): enabled, ("failing",): failing, ("disabled",): disabled},
        "state",
    )
    yield _gauge("dray_webhook_waiting", "Messages waiting to be sent to webhooks.", {(): waiting})
    yield _gauge(
        "dray_webhook_oldest_seconds",
        "Age of the oldest message waiting to be sent to a webhook.",
        {(): _age_s(oldest_at, watched.now)},
    )


def _slot_seconds(seconds: Mapping[str, float]) -> Family:
    family = CounterMetricFamily(
        "dray_slot_seconds", "Slot-seconds of all jobs, by type of use.", labels=["class"]
    )
    for slot_class in TimeCategory:
        family.add_metric([slot_class.value], seconds.get(slot_class, 0.0))
    return family


def _of_meter(metric: ServiceMetric, cells: Mapping[Cell, float]) -> Family:
    labels = [] if metric.label is None else [metric.label]
    family: CounterMetricFamily | HistogramMetricFamily
    if not metric.bounds:
        family = CounterMetricFamily(metric.name, metric.help, labels=labels)
        for value in metric.values:
            amount = cells.get((metric.name, value, COUNT), 0.0)
            family.add_metric([value] if labels else [], amount)
        return family
    family = HistogramMetricFamily(metric.name, metric.help, labels=labels)
    for value in metric.values:
        numbers = accumulate(cells.get((metric.name, value, part), 0.0) for part in metric.parts)
        buckets = list(zip(metric.parts, numbers, strict=True))
        total = cells.get((metric.name, value, SUM), 0.0)
        family.add_metric([value] if labels else [], buckets, total)
    return family


def _age_s(since: datetime | None, now: datetime) -> float:
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())
