"""Prometheus metrics: requests are counted as they are answered, jobs and slots at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from dray.views import JobState
from ray_workers.shared.heartbeat import TimeCategory
from service.runtime import Runtime

WORKER_KINDS = ("CPU", "GPU")


class SlotSeconds(Collector):
    """Counters kept in the database, so that a restart of this process does not reset them."""

    def __init__(self) -> None:
        self.seconds: Mapping[str, float] = {}
        """Slot-seconds of each class, as last read from the database."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "dray_slot_seconds",
            "Slot-seconds of all jobs by the class of their use.",
            labels=["class"],
        )
        for slot_class in TimeCategory:
            family.add_metric([slot_class.value], self.seconds.get(slot_class, 0.0))
        yield family


class Telemetry:
    """The metrics of one application; each has a registry of its own."""

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
            "Time to answer; long polls and streams wait on purpose.",
            ("method", "route"),
            registry=self.registry,
        )
        self._jobs = Gauge("dray_jobs", "Jobs by state.", ("state",), registry=self.registry)
        self._waiting = Gauge(
            "dray_queue_depth", "Jobs that wait for slots.", registry=self.registry
        )
        self._connected = Gauge(
            "dray_cluster_connected", "1 while Ray answers.", registry=self.registry
        )
        self._nodes = Gauge(
            "dray_nodes", "Nodes alive, accepted or refused.", ("accepted",), registry=self.registry
        )
        self._slots = Gauge(
            "dray_resources",
            "Ray resources of accepted nodes, and what attempts hold.",
            ("kind", "what"),
            registry=self.registry,
        )

        self._reply_delay = Gauge(
            "dray_reply_delay_seconds",
            "How long the newest reports of a running job waited to be stored; 0 where this "
            "process does not run the loops.",
            registry=self.registry,
        )
        self._slot_seconds = SlotSeconds()
        self.registry.register(self._slot_seconds)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    async def render(self, runtime: Runtime) -> bytes:
        """All metrics in Prometheus' text format."""
        counts = await runtime.reading.count_jobs()
        for state in JobState:
            self._jobs.labels(state.value).set(counts.get(state, 0))
        self._waiting.set(counts.get(JobState.QUEUED, 0))
        cluster = await runtime.reading.cluster()
        alive = [node for node in cluster.nodes if node.alive]
        self._connected.set(cluster.connected)
        for accepted in (True, False):
            count = sum(node.accepted is accepted for node in alive)
            self._nodes.labels(str(accepted).lower()).set(count)
        usable = [node for node in alive if node.accepted]
        for kind in WORKER_KINDS:
            total = sum(node.resources.get(kind, 0.0) for node in usable)
            held = sum(node.held.get(kind, 0.0) for node in usable)
            self._slots.labels(kind, "total").set(total)
            self._slots.labels(kind, "held").set(held)
        self._reply_delay.set(runtime.reply_delay_s or 0.0)
        self._slot_seconds.seconds = await runtime.faults.slot_seconds()
        return generate_latest(self.registry)
