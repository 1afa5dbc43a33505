"""The choice for `sync: auto`: all-reduce, unless another way is expected to be much faster.

Only facts are accepted as reasons: the speeds of ranks that were measured in an earlier job, and a
bandwidth that was given by the user. Times are also computed from defaults (for an unknown
bandwidth, and always for the latency of a message), but a default is never a reason for a choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from dray.input.validation import Fault, check_as
from dray.spec import AllReduce, AutoSync, JobSpec, Sync
from ray_workers.shared.memory_limit import human
from service.planning.model.choice import spoken
from service.planning.model.meshes import document_with
from service.planning.model.sync_costs import ALL_REDUCE, SyncCost, Work, sync_costs

GAIN = 1.5
"""Minimum speed, relative to all-reduce, for choosing a different way to keep the ranks in sync.
With other ways, copies differ or gradients are stale, so training might need more steps, and it
results in different weights."""
MOST_MOMENTUM = 0.5
"""Maximum momentum of sgd with stale updates, which themselves act like momentum (Mitliagkas et al.
2016, arXiv:1605.09774). With 0.9, the job in `benchmarks/topologies` diverges."""
STRAGGLES, LARGE = 1.25, 0.25
"""Thresholds above which an explanation mentions a reason: the time of the slowest rank relative to
the median rank, and the fraction of a step that is spent sending."""
LONGEST = 0.05
"""Options whose step times differ by less than this fraction are considered equally fast; of these,
the option that is most similar to all-reduce is chosen."""
_SYNC: TypeAdapter[Sync] = TypeAdapter(Sync)


@dataclass(frozen=True)
class SyncFacts:
    """Information on which the choice is based, in addition to the document."""

    work: Work
    network: str
    """Source of the bandwidth."""
    knows_network: bool
    num_nodes: int | None
    """Minimum number of nodes for all workers; None if the cluster is unknown or too small."""
    may_get_spot: bool
    """Whether workers could get nodes that can be reclaimed at any time."""


@dataclass(frozen=True)
class SyncCandidate:
    """A way to keep copies in sync, and the reason for or against it."""

    name: str
    spec: JobSpec | None
    """The document with this `sync`; None if the document does not allow it."""
    sync: Mapping[str, Any]
    cost: SyncCost | None
    why: str


@dataclass(frozen=True)
class SyncChoice:
    options: tuple[SyncCandidate, ...]
    """All ways to keep the copies in sync, beginning with all-reduce."""
    chosen: SyncCandidate
    facts: tuple[str, ...]
    """The facts on which the choice is based, as sentences."""


def choose_sync(spec: JobSpec, facts: SyncFacts | str) -> SyncChoice:
    """Choose a way. `spec` is a document in which only `sync` can be `auto`; its `sync` is ignored.
    `facts` is either the facts, or the reason why all-reduce can't be compared to alternatives."""
    if isinstance(facts, str):
        only = _only_all_reduce(spec, facts)
        return SyncChoice((only,), only, ())
    costs = sync_costs(facts.work)
    first, gains = costs[0], _gains(costs, facts)
    tried = [_tried(spec, cost, facts) for cost in costs]
    able = [
        cost
        for cost, gain, (found, _) in zip(costs, gains, tried, strict=True)
        if found is not None and gain >= GAIN
    ]
    best = first
    if able:
        least = min(cost.step_time_s for cost in able)
        best = next(cost for cost in able if cost.step_time_s <= least * (1 + LONGEST))
    options = []
    for cost, gain, (found, against) in zip(costs, gains, tried, strict=True):
        why = against or _why(cost, gain, best, first, facts)
        options.append(
            SyncCandidate(_SYNC.validate_python(cost.sync).label, found, cost.sync, cost, why)
        )
    return SyncChoice(tuple(options), options[costs.index(best)], _sentences(facts, spec))


def _only_all_reduce(spec: JobSpec, why: str) -> SyncCandidate:
    return SyncCandidate(AllReduce().label, _as_all_reduce(spec), ALL_REDUCE, None, why)


def _as_all_reduce(spec: JobSpec) -> JobSpec:
    """Return the document with all-reduce instead of `auto`. Other documents are returned
    unchanged."""
    if not isinstance(spec.sync, AutoSync):
        return spec
    return check_as(JobSpec, document_with(spec, {"sync": ALL_REDUCE}))


def _tried(spec: JobSpec, cost: SyncCost, facts: SyncFacts) -> tuple[JobSpec | None, str | None]:
    """Return (document with this `sync`, None), or (None, reason why this is impossible)."""
    if cost.sync == ALL_REDUCE:
        return _as_all_reduce(spec), None
    try:
        found = check_as(JobSpec, document_with(spec, {"sync": dict(cost.sync)}))
    except Fault as fault:
        field = (fault.pointer or "").strip("/").replace("/", ".")
        return None, f"the job document does not allow this option: {field} {fault.detail}"
    optimizer, is_stale = spec.train.optimizer, cost.sync.get("mode") in ("asynchronous", "bounded")
    if is_stale and optimizer.name == "sgd" and optimizer.momentum > MOST_MOMENTUM:
        return None, (
            f"with train.optimizer.momentum {optimizer.momentum:g}, stale updates can cause "
            f"divergence: set the momentum to {MOST_MOMENTUM} or less, or use adamw"
        )
    if cost.sync["kind"] == "parameter_server" and facts.may_get_spot:
        return None, (
            "workers could be placed on spot nodes, and if a node with a server is reclaimed, the "
            "job returns to its last checkpoint"
        )
    return found, None


def _gains(costs: Sequence[SyncCost], facts: SyncFacts) -> list[float]:
    """Return the speed of each way to keep the ranks in sync, relative to all-reduce. Each factor
    is computed with and without defaults, and the smaller value is returned."""
    bandwidth = facts.work.bandwidth_bytes_per_s if facts.knows_network else math.inf
    known = sync_costs(replace(facts.work, bandwidth_bytes_per_s=bandwidth, latency_s=0.0))
    return [
        min(costs[0].step_time_s / cost.step_time_s, known[0].step_time_s / sure.step_time_s)
        for cost, sure in zip(costs, known, strict=True)
    ]


def _why(cost: SyncCost, gain: float, best: SyncCost, first: SyncCost, facts: SyncFacts) -> str:
    takes = f"takes {spoken(cost.step_time_s)} per step"
    times = first.step_time_s / cost.step_time_s
    if cost is best:
        if cost is first:
            return (
                f"{takes}, and no other option that the document allows is known to be {GAIN} "
                "times as fast"
            )
        return f"{takes}, {times:.1f} times as fast as all-reduce: {_reason(first, facts)}"
    if cost is first:
        return f"{takes}: {_reason(first, facts)}"
    if times <= 1.0:
        return f"{takes}, no faster than all-reduce"
    if gain >= GAIN:
        longer = cost.step_time_s / best.step_time_s
        return f"{takes}, {longer:.2f} times as long as the chosen option"
    if times >= GAIN and facts.knows_network:
        return f"{takes}, {times:.1f} times as fast as all-reduce, with an assumed latency"
    if times >= GAIN:
        return (
            f"{takes}, {times:.1f} times as fast as all-reduce if the network is as fast as "
            "assumed: set sync.bandwidth_bytes_per_s, so that dray can choose this option"
        )
    return (
        f"{takes}, {times:.2f} times as fast as all-reduce: not enough to justify "
        "differing copies of the model"
    )


def _reason(first: SyncCost, facts: SyncFacts) -> str:
    """Return the reason why all-reduce takes a long time."""
    speeds, share = facts.work.speeds, 1 - first.compute_s / first.step_time_s
    reasons = []
    if speeds.slowest >= STRAGGLES:
        reasons.append(
            f"the slowest rank, for which all ranks wait, takes {speeds.slowest:.1f} times as "
            f"long as the median rank, as measured in {speeds.job_id}"
        )
    if not reasons or (facts.knows_network and share >= LARGE):
        reasons.append(f"sending gradients takes {share:.0%} of a step with all-reduce")
    return ", and ".join(reasons)


def _sentences(facts: SyncFacts, spec: JobSpec) -> tuple[str, ...]:
    work = facts.work
    found = [
        f"the weights are {human(work.weights_bytes)}, and a worker computes its share of a batch "
        f"in {spoken(work.compute_s)}",
        f"network: {human(work.bandwidth_bytes_per_s)}/s for each worker, {facts.network}",
    ]
    if spec.resources.gpus_per_worker:
        found.append(
            "the ranks are assumed to be equally fast: speeds of ranks are not measured on GPUs"
        )
    elif work.speeds.job_id is None:
        found.append(
            "the ranks are assumed to be equally fast: no recent job of this recipe with `sync` "
            "has succeeded on CPU"
        )
    else:
        found.append(
            f"the slowest rank takes {work.speeds.slowest:.2f} times as long as the median rank, "
            f"as measured in {work.speeds.job_id}"
        )
    if facts.num_nodes is not None:
        plural = "node" if facts.num_nodes == 1 else "nodes"
        found.append(
            f"all workers ({spec.resources.num_workers}) run on {facts.num_nodes} {plural}"
        )
    if facts.may_get_spot:
        found.append("workers may get spot nodes")
    return tuple(found)
