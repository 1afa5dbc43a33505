"""The replay: a cluster of 16 nodes with 4 GPUs each, and jobs that train according to their
traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.scheduler.traces import Application, Placement
from service.domain.scheduling.elastic.sizing import ReportedStep

NUM_NODES, GPUS_PER_NODE = 16, 4
ROUND_S = 60.0
"""Seconds between two decisions of a policy."""
MOST_NOISE = 1e9
"""Upper bound, for traces with zero gradients."""
RESTART_S = 30.0
"""Seconds for which each allocation holds its GPUs before the job trains."""


@dataclass
class ReplayedJob:
    """A job and its progress."""

    name: str
    application: Application
    submitted_s: float
    user: str
    num_gpus: int
    batch_size: int
    """The current batch size."""
    batch_range: tuple[int, int] | None = None
    """The minimum and maximum batch size. None for jobs with a fixed batch size."""
    batch_since_s: float = 0.0
    """When the current batch size was chosen."""
    noise_scale: float | None = None
    """The last measured noise scale, in samples."""
    nodes: dict[int, int] = field(default_factory=dict)
    """Number of GPUs that the job holds, by node."""
    gpu_s: float = 0.0
    """GPU-seconds that the job has used."""
    ran_s: float = 0.0
    """Seconds for which the job has trained."""
    since_s: float = 0.0
    """When the job received or lost its GPUs."""
    epoch: int = 0
    step_times: dict[tuple[int, int, int], ReportedStep] = field(default_factory=dict)
    """Reported step times, by workers, nodes and batch size."""
    finished_s: float | None = None
    _progress: float = 0.0
    _restart_s: float = 0.0

    @property
    def completion_s(self) -> float:
        assert self.finished_s is not None
        return self.finished_s - self.submitted_s

    @property
    def share_done(self) -> float:
        """Share of all epochs that is complete, as reported by jobs."""
        ends = self.application.epoch_ends
        began = ends[self.epoch - 1] if self.epoch else 0.0
        within = (self._progress - began) / (ends[self.epoch] - began)
        return (self.epoch + within) / len(ends)

    @property
    def steps_left(self) -> float | None:
        """Remaining steps, estimated from the progress at the current batch size and gain per
        step."""
        share = self.share_done
        if share == 0:
            return None
        return self._progress * (1 - share) / share / self._gain(self.batch_size)

    @property
    def alone_s(self) -> float:
        """Return the job's completion time if it had the cluster to itself."""
        alone = ReplayedJob(
            self.name, self.application, 0.0, self.user, self.num_gpus, self.batch_size
        )
        replay([alone], _Alone())
        return alone.completion_s

    def allocate(self, nodes: Mapping[int, int], now: float) -> None:
        if nodes != self.nodes:
            self.nodes, self.since_s = dict(nodes), now
            self._restart_s = RESTART_S if nodes else 0.0

    def change_batch(self, size: int, now: float) -> None:
        if size != self.batch_size:
            self.batch_size, self.batch_since_s = size, now

    def train(self, now: float) -> None:
        """Train for a round that begins now, if the job has GPUs."""
        if not self.nodes:
            return
        self.gpu_s += sum(self.nodes.values()) * ROUND_S
        at = min(self._restart_s, ROUND_S)
        self.ran_s += ROUND_S - at
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
        """Return the progress per second."""
        placement: Placement = tuple(self.nodes[node] for node in sorted(self.nodes))
        step_s, size = self.application.step_time(placement, self.batch_size)
        measured = ReportedStep(sum(placement), len(placement), size, step_s)
        self.step_times[measured.num_workers, measured.num_nodes, size] = measured
        noise = self.application.gradients(size, self.epoch).noise
        self.noise_scale = min(self.application.batch_sizes[0] * noise, MOST_NOISE)
        return self._gain(size) / step_s

    def _gain(self, size: int) -> float:
        scale = size / self.application.batch_sizes[0]
        return self.application.gradients(size, self.epoch).gain(scale)


Allocation = Mapping[str, Mapping[int, int]]
"""The number of GPUs by node, for each job that has any."""


class ReplayedPolicy(Protocol):
    """Decides once per round."""

    def allocate(self, jobs: Sequence[ReplayedJob], now: float) -> Allocation:
        """Return the GPUs for this round. jobs: the unfinished jobs, in the order of submission."""


def replay(jobs: Sequence[ReplayedJob], policy: ReplayedPolicy) -> list[int]:
    """Replay until every job has finished. Return how many GPUs were in use in each round."""
    waiting = sorted(jobs, key=lambda job: job.submitted_s)
    active: list[ReplayedJob] = []
    now = 0.0
    held = []
    while waiting or active:
        while waiting and waiting[0].submitted_s <= now:
            active.append(waiting.pop(0))
        allocation = policy.allocate(active, now)
        for job in active:
            job.allocate(allocation.get(job.name, {}), now)
        held.append(sum(sum(job.nodes.values()) for job in active))
        for job in active:
            job.train(now)
        active = [job for job in active if job.finished_s is None]
        now += ROUND_S
    return held


def on_emptiest_nodes(active: Sequence[ReplayedJob], chosen: Sequence[ReplayedJob]) -> Allocation:
    """Return an allocation in which continuing jobs keep their GPUs, and others get GPUs on the
    emptiest nodes."""
    kept = {id(job) for job in chosen}
    free = dict.fromkeys(range(NUM_NODES), GPUS_PER_NODE)
    for job in active:
        for node, count in job.nodes.items() if id(job) in kept else ():
            free[node] -= count
    return {job.name: job.nodes or _taken(free, job.num_gpus) for job in chosen}


class _Alone:
    def allocate(self, jobs: Sequence[ReplayedJob], now: float) -> Allocation:
        return on_emptiest_nodes(jobs, jobs)


def _taken(free: dict[int, int], num_gpus: int) -> dict[int, int]:
    nodes: dict[int, int] = {}
    while num_gpus:
        node = max(free, key=lambda at: (free[at], -at))
        nodes[node] = min(free[node], num_gpus)
        free[node] -= nodes[node]
        num_gpus -= nodes[node]
    return nodes
