"""The cost of each way to keep copies in sync: bytes, time and staleness per step.

A step is a global batch. With n ranks and weights of W bytes:

- a ring all-reduce sends 2 (n - 1) / n W per rank, in 2 (n - 1) consecutive messages;
- with gossip, each rank sends W to each neighbour while it computes;
- with parameter servers, each worker pulls W and pushes W (if asynchronous, once per batch).

If ranks wait for each other, the slowest rank determines the speed; otherwise, the speed is the
mean of the ranks' speeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

ALL_REDUCE = {"kind": "all_reduce"}
INTERVALS = (4, 8, 16, 32)
"""Possible numbers of local steps between two averages. The planner uses the smallest number for
which sending takes only a small part of the time."""
SMALL = 0.1
"""Maximum ratio of the sending time to a step's computing time that is considered small."""
WORKERS_OF_A_SERVER = 8


@dataclass(frozen=True)
class RankSpeeds:
    """How much the speeds of ranks differ, as measured in an earlier job."""

    slowest: float = 1.0
    """Computing time of the slowest rank, relative to the median rank."""
    mean_speed: float = 1.0
    """Mean speed of the ranks, relative to the median rank."""
    job_id: str | None = None
    """Job in which the speeds were measured. If None, no speeds were measured, and all ranks are
    assumed to be equally fast."""


@dataclass(frozen=True)
class Work:
    """Computation and communication of a job's ranks."""

    num_ranks: int
    weights_bytes: float
    compute_s: float
    """Computing time for a rank's share of a batch, on a worker of median speed."""
    bandwidth_bytes_per_s: float
    """Bandwidth of each rank while all ranks are sending."""
    latency_s: float
    speeds: RankSpeeds = RankSpeeds()

    @property
    def send_weights_s(self) -> float:
        return self.weights_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class SyncCost:
    """One way to keep copies in sync, and its cost per step."""

    sync: Mapping[str, Any]
    """The field `sync` of a job document."""
    sent_bytes: float
    """Total number of bytes that all ranks send."""
    compute_s: float
    """Step time if no data had to be sent."""
    step_time_s: float
    staleness_steps: int
    """Maximum number of steps until a rank's update has reached the weights of all other ranks."""


def sync_costs(work: Work) -> list[SyncCost]:
    """Return the costs of all ways to keep the ranks in sync, in order of decreasing similarity to
    all-reduce, which is first."""
    return [_all_reduce(work), _local_steps(work), *_gossip(work), *_parameter_servers(work)]


def _all_reduce(work: Work) -> SyncCost:
    compute_s = work.compute_s * work.speeds.slowest
    sent = 2 * (work.num_ranks - 1) * work.weights_bytes
    return SyncCost(ALL_REDUCE, sent, compute_s, compute_s + _all_reduce_s(work), 0)


def _all_reduce_s(work: Work) -> float:
    others = work.num_ranks - 1
    return 2 * others * (work.send_weights_s / work.num_ranks + work.latency_s)


def _local_steps(work: Work) -> SyncCost:
    compute_s, send_s = work.compute_s * work.speeds.slowest, _all_reduce_s(work)
    few = (every for every in INTERVALS if send_s / every <= SMALL * compute_s)
    every = next(few, INTERVALS[-1])
    sent = 2 * (work.num_ranks - 1) * work.weights_bytes / every
    sync = {"kind": "all_reduce", "every": every}
    return SyncCost(sync, sent, compute_s, compute_s + send_s / every, every - 1)


def _gossip(work: Work) -> Iterator[SyncCost]:
    """Yield the costs of gossip. Sending and computing overlap, so the longer of the two is the
    step time."""
    num_ranks, weights_s = work.num_ranks, work.send_weights_s
    around = num_ranks // 2
    compute_s = work.compute_s * work.speeds.slowest
    neighbours = min(2, num_ranks - 1)
    sent = neighbours * num_ranks * work.weights_bytes
    step_s = max(compute_s, neighbours * weights_s + work.latency_s)
    ring = {"kind": "gossip", "mode": "d_psgd", "graph": "ring"}
    yield SyncCost(ring, sent, compute_s, step_s, around)

    sent = num_ranks * work.weights_bytes
    step_s = max(compute_s, weights_s + work.latency_s)
    doubling = math.ceil(math.log2(num_ranks)) if num_ranks > 1 else 0
    push = {"kind": "gossip", "mode": "sgp", "graph": "exponential"}
    yield SyncCost(push, sent, compute_s, step_s, doubling)

    compute_s = work.compute_s / work.speeds.mean_speed
    step_s = max(compute_s, weights_s + 3 * work.latency_s)
    graph = "random" if num_ranks % 2 else "ring"
    pairs = {"kind": "gossip", "mode": "ad_psgd", "graph": graph}
    yield SyncCost(pairs, sent, compute_s, step_s, around)


def _parameter_servers(work: Work) -> Iterator[SyncCost]:
    servers = max(1, work.num_ranks // (WORKERS_OF_A_SERVER + 1))
    workers = max(1, work.num_ranks - servers)
    kind = {"kind": "parameter_server", "servers": servers}
    batch_s = work.compute_s * work.num_ranks
    # The time that a server takes to receive a gradient, or to send its part of the weights.
    at_server_s = work.send_weights_s / servers

    # With several servers, server 0 determines the staleness before the other servers receive their
    # parts of a gradient.
    messages = 3 if servers == 1 else 4
    own_s = 2 * work.send_weights_s + messages * work.latency_s
    for mode, slowness, more in (
        ("bounded", work.speeds.slowest, {"max_staleness": 4}),
        ("asynchronous", 1 / work.speeds.mean_speed, {}),
    ):
        # If one worker is always slow, the others eventually wait for it at the staleness bound.
        compute_s = batch_s * slowness / workers
        step_s = max(compute_s + own_s / workers, at_server_s)
        sync = {**kind, "mode": mode, **more, "correction": {"name": "staleness_lr"}}
        yield SyncCost(sync, 2 * work.weights_bytes, compute_s, step_s, workers - 1)

    compute_s = batch_s * work.speeds.slowest / workers
    step_s = compute_s + 2 * workers * at_server_s + 3 * work.latency_s
    sent = 2 * workers * work.weights_bytes
    yield SyncCost({**kind, "mode": "synchronous"}, sent, compute_s, step_s, 0)
