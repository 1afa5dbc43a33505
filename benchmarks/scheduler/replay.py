"""The replay: a cluster of 16 nodes with 4 GPUs, and jobs that train as their traces say."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.scheduler.traces import Application, Placement

NUM_NODES, GPUS_PER_NODE = 16, 4
ROUND_S = 60.0
"""How often a policy is asked."""
RESTART_S = 30.0
"""Each allocation holds its GPUs for so long before the job trains."""


@dataclass
class ReplayedJob:
    """A job and how far it is."""

    name: str
    application: Application
    submitted_s: float
    num_gpus: int
    batch_size: int
    nodes: dict[int, int] = field(default_factory=dict)
    """GPUs that it holds, by node."""
    gpu_s: float = 0.0
    """GPU-seconds that it has held."""
    epoch: int = 0
    finished_s: float | None = None
    _progress: float = 0.0
    _restart_s: float = 0.0

    @property
    def completion_s(self) -> float:
        assert self.finished_s is not None
        return self.finished_s - self.submitted_s

    @property
    def share_done(self) -> float:
        """As a job's own report says it: of all epochs."""
        ends = self.application.epoch_ends
        began = ends[self.epoch - 1] if self.epoch else 0.0
        within = (self._progress - began) / (ends[self.epoch] - began)
        return (self.epoch + within) / len(ends)

    def allocate(self, nodes: Mapping[int, int]) -> None:
        if nodes != self.nodes:
            self.nodes = dict(nodes)
            self._restart_s = RESTART_S if nodes else 0.0

    def train(self, now: float) -> None:
        """Train for a round that begins now, if it has GPUs."""
        if not self.nodes:
            return
        self.gpu_s += sum(self.nodes.values()) * ROUND_S
        at = min(self._restart_s, ROUND_S)
        self._restart_s -= at
        ends = self.application.epoch_ends
        while at < ROUND_S and self.finished_s is None:
            rate = self._rate()
            left_s = max(0.0, ends[self.epoch] - self._progress) / rate
            if left_s > ROUND_S - at:
                self._progress += rate * (ROUND_S - at)
                return
            at += left_s
            self._progress = ends[self.epoch]
            if self.epoch + 1 == len(ends):
                self.finished_s = now + at
                self.nodes = {}
            else:
                self.epoch += 1

    def _rate(self) -> float:
        """Progress a second."""
        placement: Placement = tuple(self.nodes[node] for node in sorted(self.nodes))
        step_s, batch_size = self.application.step_time(placement, self.batch_size)
        scale = batch_size / self.application.batch_sizes[0]
        return self.application.gradients(batch_size, self.epoch).gain(scale) / step_s


class ReplayedPolicy(Protocol):
    """Decides once a round."""

    def running(self, jobs: Sequence[ReplayedJob], now: float) -> Sequence[ReplayedJob]:
        """Those of the unfinished jobs, in the order of their submission, that are to hold their
        GPUs in this round; no more than there are."""


def workload(path: Path, applications: Mapping[str, Application]) -> list[ReplayedJob]:
    """The jobs of a file."""
    with path.open() as file:
        return [
            ReplayedJob(
                name=row["name"],
                application=applications[row["application"]],
                submitted_s=float(row["time"]),
                num_gpus=int(row["num_replicas"]),
                batch_size=int(row["batch_size"]),
            )
            for row in csv.DictReader(file)
        ]


def replay(jobs: Sequence[ReplayedJob], policy: ReplayedPolicy) -> None:
    """Play until every job has finished."""
    waiting = sorted(jobs, key=lambda job: job.submitted_s)
    active: list[ReplayedJob] = []
    now = 0.0
    while waiting or active:
        while waiting and waiting[0].submitted_s <= now:
            active.append(waiting.pop(0))
        _place(active, policy.running(active, now))
        for job in active:
            job.train(now)
        active = [job for job in active if job.finished_s is None]
        now += ROUND_S


def _place(active: Sequence[ReplayedJob], chosen: Sequence[ReplayedJob]) -> None:
    """Those that go on keep their GPUs; the others get theirs from the emptiest nodes."""
    kept = {id(job) for job in chosen}
    free = dict.fromkeys(range(NUM_NODES), GPUS_PER_NODE)
    for job in active:
        if id(job) not in kept:
            job.allocate({})
        for node, count in job.nodes.items():
            free[node] -= count
    for job in chosen:
        if not job.nodes:
            job.allocate(_taken(free, job.num_gpus))


def _taken(free: dict[int, int], num_gpus: int) -> dict[int, int]:
    nodes: dict[int, int] = {}
    while num_gpus:
        node = max(free, key=lambda at: (free[at], -at))
        nodes[node] = min(free[node], num_gpus)
        free[node] -= nodes[node]
        num_gpus -= nodes[node]
    return nodes
