"""The information available at submission for the choice of `sync: auto`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from dray.spec import AutoSync, JobSpec
from ray_workers.shared.contracts import COMPUTE_TIME
from service.config.node_types import label_resources
from service.db.repositories import jobs as repository
from service.domain.scheduling.placement import slots
from service.nodes import node_table
from service.planning.model.cost import Machine, step_time, weights_bytes
from service.planning.model.memory import traces_of
from service.planning.model.meshes import name_of
from service.planning.model.shapes import Shapes
from service.planning.model.sync_choice import SyncFacts
from service.planning.model.sync_costs import RankSpeeds, Work
from service.telemetry import metric_reader

LOOKED_AT, COUNTED = 50, 3
"""Number of the latest successful jobs to examine, and number of jobs whose speeds are read."""
MOST_RANKS = 64
"""Maximum number of ranks of a job whose speeds are read."""
LEAST_STEPS = 10
SAMPLED_STEPS = 100
LEAST_COMPUTE_S = 1e-3
"""Minimum computing time of a step. Even the smallest models spend this much time in Python and the
optimizer."""
SPOT = label_resources({"ray.io/market-type": "spot"})


def facts_of(
    spec: JobSpec,
    shapes: Shapes,
    machine: Machine,
    speeds: RankSpeeds,
    nodes: Nodes,
    *,
    is_measured: bool = False,
) -> SyncFacts | str:
    """Return the facts, or the reason why there is nothing to choose. `is_measured` is set if the
    bandwidth of `machine` was given in the request."""
    num_workers = spec.resources.num_workers
    if num_workers == 1:
        return "a single worker has no other workers to synchronize with"
    if spec.is_divided:
        return f"the model is divided among the ranks: {name_of(spec.parallel, num_workers)}"
    bandwidth, network = machine.bandwidth_bytes_per_s, machine.source
    if is_measured:
        network = "as given in the request"
    elif isinstance(spec.sync, AutoSync) and spec.sync.bandwidth_bytes_per_s is not None:
        is_measured = True
        bandwidth, network = spec.sync.bandwidth_bytes_per_s, "as given in the document"
    else:
        network = "a default: not measured here"
    alike = spec.model_copy(update={"sync": None})
    work = Work(
        num_ranks=num_workers,
        weights_bytes=weights_bytes(traces_of(alike, shapes, on_gpu=False)),
        compute_s=max(LEAST_COMPUTE_S, step_time(alike, shapes, machine).compute_s),
        bandwidth_bytes_per_s=bandwidth,
        latency_s=machine.latency_s,
        speeds=speeds,
    )
    return SyncFacts(work, network, is_measured, nodes.num_needed, nodes.may_be_spot)


class Nodes(NamedTuple):
    """The nodes that a job's workers could get."""

    num_needed: int | None
    """Minimum number of nodes for all workers; None if the cluster is unknown or too small."""
    may_be_spot: bool


def nodes_for(session: Session, spec: JobSpec) -> Nodes:
    bundle = slots.request_of(spec.resources).bundle
    able = [node for node in node_table.usable(session) or () if slots.fits(bundle, node.total)]
    left, needed = spec.resources.num_workers, 0
    for number in sorted((slots.fits(bundle, node.total) for node in able), reverse=True):
        if left > 0:
            left, needed = left - number, needed + 1
    is_spot = any(SPOT.keys() <= node.total.keys() for node in able)
    return Nodes(needed if left <= 0 else None, is_spot)


def speeds_of(session: Session, spec: JobSpec) -> RankSpeeds:
    """Find the recent job of the same recipe whose ranks differ the least in speed, and return its
    ranks' speeds.

    A few jobs are compared, so that a rank that was slow only once has no effect.
    """
    found: list[RankSpeeds] = []
    for job_id, document in repository.newest_succeeded(session, LOOKED_AT):
        if _is_alike(document, spec):
            speeds = _measured(session, job_id, document["resources"]["num_workers"])
            found += [] if speeds is None else [speeds]
        if len(found) == COUNTED:
            break
    return min(found, key=lambda speeds: speeds.slowest, default=RankSpeeds())


def _is_alike(document: Mapping[str, Any], spec: JobSpec) -> bool:
    resources = document.get("resources", {})
    return (
        document.get("recipe") == spec.recipe
        and document.get("sync") is not None
        and resources.get("num_workers", 1) > 1
        and resources.get("gpus_per_worker", 0) == spec.resources.gpus_per_worker
        and resources.get("node_labels", {}) == spec.resources.node_labels
    )


def _measured(session: Session, job_id: str, num_ranks: int) -> RankSpeeds | None:
    seconds = []
    for rank in range(min(num_ranks, MOST_RANKS)):
        series = metric_reader.read(
            session, job_id, keys=[COMPUTE_TIME], rank=rank, after_step=-1, max_points=SAMPLED_STEPS
        )
        values = series[COMPUTE_TIME][1] if COMPUTE_TIME in series else ()
        if len(values) >= LEAST_STEPS:
            seconds.append(statistics.median(values))
    if len(seconds) < 2 or min(seconds) <= 0.0:
        return None
    middle = statistics.median_low(seconds)
    speeds = [middle / each for each in seconds]
    return RankSpeeds(max(seconds) / middle, statistics.mean(speeds), job_id)
