"""Generates the metrics reference: the service's Prometheus metrics, and the metrics of jobs."""

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

## Metrics of the service

`GET /metrics` of any API process returns these metrics in the Prometheus format.
[Monitoring](../guides/monitoring.md) provides a configuration, alerts and a dashboard. Histograms
have the samples `_bucket`, `_sum` and `_count`.

"""
_JOBS = """
## Metrics of jobs

Recipes report the following series. For a script, dray records the metrics that it passes to
`train.report`, and metrics [found in its output](../guides/scripts-metrics.md). [System
metrics](../guides/system-metrics.md) are described on a separate page.

"""
_OF_JOBS = {
    "train/loss": "loss of the step, over all ranks if they share a model",
    "train/lr": "learning rate of the step",
    "train/grad_norm": "norm of the gradient before clipping",
    "train/global_batch_size": "number of samples in the step, over all ranks",
    "train/gradient_noise_scale": "with `train.measure_noise`: gradient noise scale, in samples",
    "train/consensus_distance": "gossip and local steps: distance of the ranks' copies of "
    "the model from their mean",
    "perf/step_time_s": "per rank: duration of the step, in seconds",
    "perf/data_wait_s": "per rank: time that the step waited for data, in seconds",
    "perf/compute_time_s": "per rank: computation time before the first exchange, in seconds",
    "perf/tokens": "fine-tuning, per rank: number of tokens in the step, including padding",
    "perf/samples_per_s": "total samples per second over all ranks",
    "perf/sent_bytes": "per rank: bytes sent to other ranks in the step",
    "sync/sent_bytes": "bytes sent by all ranks in the step",
    "sync/clock": "parameter servers, per worker: number of batches computed",
    "sync/staleness": "parameter servers, per worker: steps between the worker's pull and its push",
    "sync/staleness_mean": "asynchronous training: mean staleness of the updates so far",
    "sync/staleness_max": "asynchronous training: largest staleness so far; also `_p50`, `_p95`, "
    "`_p99`",
    "perf/compression": "size of the gradient divided by the bytes sent",
    "perf/eval_time_s": "duration of an evaluation, in seconds",
    "perf/check_time_s": "`check.replicas_every`: duration of a comparison of the replicas, in "
    "seconds",
    "check/replicas_differ": "`check.replicas_every`: number of ranks whose replica differs",
    "perf/checkpoint_stall_s": "time for which a checkpoint paused training, in seconds",
    "perf/checkpoint_every_steps": "`checkpoint.every_steps: auto`: the chosen interval",
    "perf/copy_time_s": "`checkpoint.in_memory`: duration of a copy of the state on rank 0, "
    "concurrently with training, in seconds",
    "perf/copy_bytes": "`checkpoint.in_memory`: size of rank 0's share of the state",
    "federated/updates": "number of updates that the server used; 0 in a round without a quorum",
    "federated/dropped_out": "number of clients that sent nothing in the round",
    "federated/stragglers": "number of clients that were slow in the round",
    "federated/refused": "number of clients whose updates were refused in the round",
    "federated/update_norm": "median norm of the updates; not available with `secure_aggregation`",
    "federated/epsilon": "with `federated.privacy`: privacy budget (epsilon) spent so far",
    "federated/clip_norm": "with `federated.privacy`: the norm to which updates are clipped",
    "federated/val_loss": "clients outside the cluster: mean of their validation losses",
    "federated/worst_tenth_val_loss": (
        "clients outside the cluster: mean of the highest tenth of their validation losses"
    ),
}


def page() -> str:
    of_jobs = [(f"`{key}`", meaning) for key, meaning in _OF_JOBS.items()]
    of_jobs += [
        (f"`{key}`", f"`{recipe}`: on the entire validation split")
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
    """Returns the metric families of a service without jobs, nodes or queues."""
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
