"""The page of metrics: those of the service for Prometheus, and those of jobs."""

from __future__ import annotations

from datetime import UTC, datetime

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from api.observability.prometheus import Telemetry, families
from dray import views
from dray.spec.program.recipes import RECIPES
from manual.tables import table
from service.loops.metering import Watched

_HEAD = """# Metrics

## Of the service

`GET /metrics` of any API process has these metrics in the format of Prometheus.
[Monitoring](../guides/monitoring.md) has a configuration, alerts and a dashboard. Histograms have
the samples `_bucket`, `_sum` and `_count`.

"""
_JOBS = """
## Of jobs

Recipes report these series. A script reports what it passes to `train.report`, and what dray
[finds in its output](../guides/scripts-metrics.md). [System metrics](../guides/system-metrics.md)
have a page of their own.

"""
_OF_JOBS = {
    "train/loss": "loss of the step; of all ranks, where they share a model",
    "train/lr": "learning rate of the step",
    "train/grad_norm": "norm of the gradient before it is clipped",
    "train/global_batch_size": "samples of the step of all ranks",
    "train/gradient_noise_scale": "`train.measure_noise`: noise scale of the gradient, in samples",
    "train/consensus_distance": "gossip, local steps: how far the copies are from their mean",
    "perf/step_time_s": "each rank: seconds of the step",
    "perf/data_wait_s": "each rank: seconds that the step waited for data",
    "perf/compute_time_s": "each rank: seconds of computing before the rank exchanges anything",
    "perf/samples_per_s": "samples a second of all ranks",
    "perf/sent_bytes": "each rank: bytes that it sent to others in the step",
    "sync/sent_bytes": "bytes that all ranks sent in the step",
    "sync/clock": "each worker of parameter servers: batches that it has computed",
    "sync/staleness": "each worker of parameter servers: steps between its pull and its push",
    "sync/staleness_mean": "asynchronous ways: mean staleness of the updates so far",
    "sync/staleness_max": "asynchronous ways: largest staleness so far; `_p50`, `_p95`, `_p99` too",
    "perf/compression": "bytes of the gradient over the bytes that were sent",
    "perf/eval_time_s": "seconds of an evaluation",
    "perf/checkpoint_stall_s": "seconds that the training stood still for a checkpoint",
    "perf/checkpoint_every_steps": "`checkpoint.every_steps: auto`: the chosen interval",
    "federated/updates": "updates that the server used; 0 in a round without its quorum",
    "federated/dropped_out": "clients that sent nothing in the round",
    "federated/stragglers": "clients that were slow in the round",
    "federated/refused": "clients whose updates were refused in the round",
    "federated/update_norm": "median of the norms of the updates; not with `secure_aggregation`",
    "federated/epsilon": "with `federated.privacy`: what the job has spent",
    "federated/clip_norm": "with `federated.privacy`: the norm to which updates are clipped",
    "federated/val_loss": "clients outside of the cluster: mean of their own validation losses",
    "federated/worst_tenth_val_loss": "the same over the worst tenth of the clients",
}


def page() -> str:
    of_jobs = [(f"`{key}`", meaning) for key, meaning in _OF_JOBS.items()]
    of_jobs += [
        (f"`{key}`", f"`{recipe}`: over the whole validation split")
        for recipe, options in RECIPES.items()
        for key in options.metrics
    ]
    return (
        _HEAD
        + table(("metric", "kind", "meaning"), map(_row, _families()))
        + _JOBS
        + table(("series", "meaning"), of_jobs)
    )


def _families() -> list[Metric]:
    """The families of a service without jobs, nodes and queues."""
    now = datetime.now(UTC)
    watched = Watched(now, {}, (), (0, 0, 0, 0, None))
    cluster = views.Cluster(connected=False, nodes=[])
    return [*Telemetry().registry.collect(), *families({}, cluster, {}, watched)]


def _row(family: Metric) -> tuple[str, str, str]:
    ending = "_total" if isinstance(family, CounterMetricFamily) or family.type == "counter" else ""
    labels = ",".join(getattr(family, "_labelnames", ()))
    name = f"{family.name}{ending}{{{labels}}}" if labels else f"{family.name}{ending}"
    kind = "histogram" if isinstance(family, HistogramMetricFamily) else family.type
    return f"`{name}`", kind, family.documentation
