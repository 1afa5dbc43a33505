"""Waiting and running jobs on nodes with GPUs, as input for the scheduling policy."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ray_workers.shared.slices import Slice
from service.domain.scheduling.placement.gangs import WorkerKind
from service.domain.scheduling.placement.pools import Offer
from service.domain.scheduling.placement.slots import held_on, offered
from service.domain.scheduling.placement.stock import Stock
from service.domain.scheduling.policy import Holder, Node, Request, RunningJob, Snapshot, WaitingJob
from service.domain.scheduling.rules.eviction import MIN_RUN_S

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR = 3600.0
GPU = {"GPU": 1.0}


def waiting(name: str, gpus: int = 1, **fields: Any) -> WaitingJob:
    """Return a recipe of unknown duration that requests this number of workers with one GPU
    each."""
    request = Request(gpus, GPU, fields.pop("min_workers", None))
    usual = {"attempt": 0, "priority": 50, "seq": 99, "waited_s": 0.0, "yields": True}
    return WaitingJob(job_id=name, request=request, **{**usual, **fields})


def running(name: str, slices: Mapping[str, int], **fields: Any) -> RunningJob:
    """Return a recipe that holds this number of GPUs on each node, has one hour left, and can be
    asked to leave."""
    parts = tuple(Slice(node, number) for node, number in slices.items())
    request = Request(sum(slices.values()), GPU)
    usual = {"priority": 50, "seq": 1, "held_s": MIN_RUN_S, "left_s": HOUR, "yields": True}
    return RunningJob(job_id=name, request=request, slices=parts, **{**usual, **fields})


def busy(nodes: Iterable[Node]) -> tuple[RunningJob, ...]:
    """Return a job of unknown duration on each node, which holds everything that is not free."""
    there = []
    for node in nodes:
        held = {name: most - node.available_to_us[name] for name, most in node.total.items()}
        request = Request(1, {name: amount for name, amount in held.items() if amount > 0})
        name = f"on-{node.id}"
        there.append(RunningJob(name, 50, 0, request, (Slice(node.id, 1),), held_s=MIN_RUN_S))
    return tuple(there)


def snapshot(
    queue: Sequence[WaitingJob],
    there: Sequence[RunningJob] = (),
    totals: Mapping[str, float] | None = None,
    **facts: Any,
) -> Snapshot:
    """totals: number of GPUs on each node."""
    holders = tuple(Holder(j.job_id, j.slices, j.request.bundle, j.queue, j.owner) for j in there)
    nodes = []
    for name, gpus in (totals or {"n": 4.0}).items():
        total = {"GPU": gpus}
        nodes.append(Node(name, total, offered(total, total, held_on(name, holders))))
    return Snapshot(tuple(queue), tuple(nodes), True, holders, running=tuple(there), **facts)


def change(
    chance: random.Random, stock: Stock, offer: Offer, kind: WorkerKind, node_id: str
) -> None:
    """Take, expect, promise or set aside slots for one to three workers."""
    slices = (Slice(node_id, chance.randint(1, 3)),)
    match chance.randrange(4):
        case 0:
            stock.take("a", kind, slices)
        case 1:
            stock.expect("b", kind, slices)
        case 2:
            stock.promise("c", kind, slices)
        case _:
            offer.reserved.set_aside(kind, slices[0].num_workers)
