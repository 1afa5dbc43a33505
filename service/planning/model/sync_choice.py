"""The choice of `sync: auto`: all-reduce, unless another way is expected to be much faster.

Only known facts count as reasons: the paces of ranks that an earlier job has measured, and a
bandwidth that the user has given. Times are computed from defaults too (the network's bandwidth,
and always the latency of a message), but a default never decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from dray.input.validation import Fault, check_as
from dray.spec import AllReduce, AutoSync, JobSpec, Sync
from service.planning.model.choice import human, spoken
from service.planning.model.meshes import document_with
from service.planning.model.sync_costs import ALL_REDUCE, SyncCost, Work, sync_costs

GAIN = 1.5
"""A way is chosen if it is at least this many times as fast as all-reduce: its copies differ or its
gradients are stale, so that a run may need more steps, and ends with different weights."""
MOST_MOMENTUM = 0.5
"""The most momentum of sgd with stale updates, which act like momentum themselves (Mitliagkas et
al. 2016, arXiv:1605.09774): with 0.9 the job of `benchmarks/topologies` diverges."""
STRAGGLES, LARGE = 1.25, 0.25
"""Bounds from which an explanation names a reason: how many times as long as the median rank the
slowest rank takes, and the fraction of a step that sending takes."""
LONGEST = 0.05
"""Ways whose times differ by a smaller fraction count as equal: the closest to all-reduce wins."""
_SYNC: TypeAdapter[Sync] = TypeAdapter(Sync)


@dataclass(frozen=True)
class SyncFacts:
    """The facts for the choice, besides the document."""

    work: Work
    network: str
    """Where the bandwidth comes from."""
    knows_network: bool
    num_nodes: int | None
    """The fewest nodes that hold all workers; None if no cluster is known."""
    may_get_spot: bool
    """Whether workers may get nodes that can be taken away at any time."""


@dataclass(frozen=True)
class SyncCandidate:
    """One way, and the reason for or against it."""

    name: str
    spec: JobSpec | None
    """The document with this way; None if the document does not allow it."""
    sync: Mapping[str, Any]
    cost: SyncCost | None
    why: str


@dataclass(frozen=True)
class SyncChoice:
    options: tuple[SyncCandidate, ...]
    """All-reduce first."""
    chosen: SyncCandidate
    facts: tuple[str, ...]
    """Sentences about the facts behind the choice."""


def choose_sync(spec: JobSpec, facts: SyncFacts | str) -> SyncChoice:
    """spec: a document without `auto` elsewhere; its own `sync` is ignored. facts: the facts, or
    the reason why no other way can be compared with all-reduce."""
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
    """The document with all-reduce in place of `auto`; other documents are returned unchanged."""
    if not isinstance(spec.sync, AutoSync):
        return spec
    return check_as(JobSpec, document_with(spec, {"sync": ALL_REDUCE}))


def _tried(spec: JobSpec, cost: SyncCost, facts: SyncFacts) -> tuple[JobSpec | None, str | None]:
    """Return (document with this way, None), or (None, the reason why that is impossible)."""
    if cost.sync == ALL_REDUCE:
        return _as_all_reduce(spec), None
    try:
        found = check_as(JobSpec, document_with(spec, {"sync": dict(cost.sync)}))
    except Fault as fault:
        field = (fault.pointer or "").strip("/").replace("/", ".")
        return None, f"this document does not allow it: {field} {fault.detail}"
    optimizer, is_stale = spec.train.optimizer, cost.sync.get("mode") in ("asynchronous", "bounded")
    if is_stale and optimizer.name == "sgd" and optimizer.momentum > MOST_MOMENTUM:
        return None, (
            f"with train.optimizer.momentum {optimizer.momentum:g} stale updates may diverge: set "
            f"{MOST_MOMENTUM} or less, or use adamw, to have it considered"
        )
    if cost.sync["kind"] == "parameter_server" and facts.may_get_spot:
        return None, (
            "workers may get spot nodes, and when a node with a server is taken away, the job goes "
            "back to its checkpoint"
        )
    return found, None


def _gains(costs: Sequence[SyncCost], facts: SyncFacts) -> list[float]:
    """How many times as fast as all-reduce each way is; the lesser with and without defaults."""
    bandwidth = facts.work.bandwidth_bytes_per_s if facts.knows_network else math.inf
    known = sync_costs(replace(facts.work, bandwidth_bytes_per_s=bandwidth, latency_s=0.0))
    return [
        min(costs[0].step_time_s / cost.step_time_s, known[0].step_time_s / sure.step_time_s)
        for cost, sure in zip(costs, known, strict=True)
    ]


def _why(cost: SyncCost, gain: float, best: SyncCost, first: SyncCost, facts: SyncFacts) -> str:
    takes = f"takes {spoken(cost.step_time_s)} a step"
    times = first.step_time_s / cost.step_time_s
    if cost is best:
        if cost is first:
            return (
                f"{takes}, and no way that the document takes is known to be {GAIN} times as fast"
            )
        return f"{takes}, {times:.1f} times as fast as all-reduce: {_reason(first, facts)}"
    if cost is first:
        return f"{takes}: {_reason(first, facts)}"
    if times <= 1.0:
        return f"{takes}, no faster than all-reduce"
    if gain >= GAIN:
        longer = cost.step_time_s / best.step_time_s
        return f"{takes}, {longer:.2f} times as long as the chosen way"
    if times >= GAIN and facts.knows_network:
        return f"{takes}, {times:.1f} times as fast as all-reduce, with an assumed latency"
    if times >= GAIN:
        return (
            f"{takes}, {times:.1f} times as fast as all-reduce, if the network is as assumed: set "
            "sync.bandwidth_bytes_per_s to have it count"
        )
    return f"{takes}, {times:.2f} times as fast as all-reduce: not enough for copies that differ"


def _reason(first: SyncCost, facts: SyncFacts) -> str:
    """The reason why all-reduce takes long."""
    paces, share = facts.work.paces, 1 - first.compute_s / first.step_time_s
    reasons = []
    if paces.slowest >= STRAGGLES:
        reasons.append(
            f"the slowest rank, which all wait for, takes {paces.slowest:.1f} times as long as the "
            f"median rank, as {paces.job_id} measured"
        )
    if not reasons or (facts.knows_network and share >= LARGE):
        reasons.append(f"sending is {share:.0%} of all-reduce's step")
    return ", and ".join(reasons)


def _sentences(facts: SyncFacts, spec: JobSpec) -> tuple[str, ...]:
    work = facts.work
    found = [
        f"the weights are {human(work.weights_bytes)}, and a worker computes its share of a batch "
        f"in {spoken(work.compute_s)}",
        f"network: {human(work.bandwidth_bytes_per_s)}/s for each worker, {facts.network}",
    ]
    if spec.resources.gpus_per_worker:
        found.append("the paces of the ranks count as equal: they are not measured on GPUs")
    elif work.paces.job_id is None:
        found.append(
            "the paces of the ranks are not known, and count as equal: no recent job of this "
            "recipe with `sync` has succeeded on CPU"
        )
    else:
        found.append(
            f"the slowest rank takes {work.paces.slowest:.2f} times as long as the median rank, as "
            f"{work.paces.job_id} measured"
        )
    if facts.num_nodes is not None:
        plural = "node holds" if facts.num_nodes == 1 else "nodes hold"
        found.append(f"{facts.num_nodes} {plural} all {spec.resources.num_workers} workers")
    if facts.may_get_spot:
        found.append("workers may get spot nodes")
    return tuple(found)
