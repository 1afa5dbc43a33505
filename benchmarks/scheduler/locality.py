"""How close together the workers of gangs are with and without a topology. Randomly drawn jobs
arrive at a cluster of racks, run for some time and leave."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

from benchmarks.report import Result, Table
from benchmarks.scheduler import snapshots
from ray_workers.shared.slices import Slice
from service.config.node_types import label_resources
from service.domain.scheduling import policy
from service.domain.scheduling.placement import slots

LEVELS = ("rack", "nvlink")
NODES_PER_NVLINK, NVLINKS_PER_RACK, NUM_RACKS = 4, 4, 8
NUM_NODES = NODES_PER_NVLINK * NVLINKS_PER_RACK * NUM_RACKS
GPUS = 8
"""Number of GPUs per node."""
DOMAIN_GPUS = {
    "rack": NODES_PER_NVLINK * NVLINKS_PER_RACK * GPUS,
    "nvlink": NODES_PER_NVLINK * GPUS,
}
GANGS = (1, 1, 2, 4, 4, 8, 8, 12, 16, 16, 24, 32, 64, 128)
NUM_JOBS = 800
MEAN_S = 3600.0
LOADS = (0.6, 0.8, 0.95)
NUM_DRAWN = 4
CASES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "none": ((), None),
    "preferred": (LEVELS, None),
    "rack required": (LEVELS, "rack"),
}
METHOD = (
    f"{NUM_NODES} nodes with {GPUS} GPUs: {NUM_RACKS} racks of {NVLINKS_PER_RACK} NVLink domains "
    f"of {NODES_PER_NVLINK} nodes. Node names are random, like Ray's ids.",
    f"{NUM_JOBS} jobs arrive at random (Poisson) and take an hour on average (exponential). Each "
    f"is a gang of {', '.join(str(size) for size in sorted(set(GANGS)))} GPUs, with small gangs "
    "more frequent. The load is the share of the GPUs that the jobs would hold if none waited. "
    f"For each load, {NUM_DRAWN} workloads are drawn with fixed seeds, so another run gives the "
    "same figures.",
    "The policy is `service.domain.scheduling.policy.plan`, called whenever a job arrives or "
    "ends: without topology levels, with `rack, nvlink`, and with gangs larger than a node that "
    "require a rack. The durations of jobs are unknown, and no job is preempted.",
    "Within an NVLink domain, or a rack: among the gangs that are larger than a node but fit "
    "into such a domain, the share whose workers are all in one. Broken up: the share of the "
    "free GPUs, up to a rack's number, that no gang could use within one rack, as a mean over "
    "the arrivals of jobs.",
)


@dataclass
class Seen:
    """Where the gangs of a simulated run were placed, and how long they waited."""

    within: dict[str, list[bool]] = field(default_factory=lambda: {level: [] for level in LEVELS})
    """For each level, whether each gang that fits into one domain was in one."""
    num_racks: list[int] = field(default_factory=list)
    """Number of racks of each gang that uses several nodes."""
    broken_up: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        for level in LEVELS:
            self.within[level] += other.within[level]
        self.num_racks += other.num_racks
        self.broken_up += other.broken_up
        self.waited_s += other.waited_s


def play(load: float, seed: int, levels: tuple[str, ...], required: str | None = None) -> Seen:
    """Simulate one workload until its last job has started. required: the level that large gangs
    require."""
    chance = random.Random(seed)
    cluster, seen = _Cluster(chance, levels), Seen()
    gap_s = MEAN_S * mean(GANGS) / (load * NUM_NODES * GPUS)
    came_s: dict[str, float] = {}
    lengths_s: dict[str, float] = {}
    events: list[tuple[float, bool, int, policy.WaitingJob]] = []
    """(time, whether the job ends instead of arriving, number, job)."""
    at_s = 0.0
    for number in range(NUM_JOBS):
        job = _waiting(chance, number, required)
        at_s += chance.expovariate(1 / gap_s)
        came_s[job.job_id], lengths_s[job.job_id] = at_s, chance.expovariate(1 / MEAN_S)
        events.append((at_s, False, number, job))
    queue: list[policy.WaitingJob] = []
    while len(seen.waited_s) < NUM_JOBS:
        at_s, has_ended, number, job = heapq.heappop(events)
        if has_ended:
            cluster.release(number)
        else:
            seen.broken_up += cluster.broken_up()
            queue.append(job)
        for started in cluster.start(queue, seen) if queue else ():
            queue.remove(started)
            seen.waited_s.append(at_s - came_s[started.job_id])
            end_s = at_s + lengths_s[started.job_id]
            heapq.heappush(events, (end_s, True, started.seq, started))
    return seen


def _waiting(chance: random.Random, seq: int, required: str | None) -> policy.WaitingJob:
    gpus = chance.choice(GANGS)
    request = slots.Request(gpus, {"GPU": 1.0}, None, required if gpus > GPUS else None)
    return policy.WaitingJob(f"job-{seq}", 0, 50, seq, request, waited_s=0.0)


class _Cluster:
    """The nodes and their free GPUs."""

    def __init__(self, chance: random.Random, levels: tuple[str, ...]) -> None:
        names = [f"{chance.getrandbits(64):016x}" for _ in range(NUM_NODES)]
        self._levels = levels
        self._domains = {
            name: {
                "rack": f"r{at // (NODES_PER_NVLINK * NVLINKS_PER_RACK)}",
                "nvlink": f"n{at // NODES_PER_NVLINK}",
            }
            for at, name in enumerate(names)
        }
        total = {"GPU": float(GPUS)}
        self._nodes = [
            slots.Node.labelled(name, total, total, labels)
            for name, labels in self._domains.items()
        ]
        self._free = dict.fromkeys(names, GPUS)
        self._held: dict[int, tuple[Slice, ...]] = {}
        """Slices by job number."""

    def start(self, queue: Sequence[policy.WaitingJob], seen: Seen) -> list[policy.WaitingJob]:
        """Start jobs, record their nodes, and return these jobs."""
        nodes = tuple(
            replace(
                node,
                available_to_us={
                    "GPU": float(self._free[node.id]),
                    **label_resources(self._domains[node.id]),
                },
            )
            for node in self._nodes
        )
        snapshot = policy.Snapshot(tuple(queue), nodes, True, topology=self._levels)
        by_id = {job.job_id: job for job in queue}
        started = []
        for decision in policy.plan(snapshot, snapshots.NOW):
            if isinstance(decision, policy.Start):
                job = by_id[decision.job_id]
                started.append(job)
                self._held[job.seq] = decision.slices
                self._change(decision.slices, -1)
                self._note(decision.slices, seen)
        return started

    def release(self, seq: int) -> None:
        self._change(self._held.pop(seq), 1)

    def broken_up(self) -> list[float]:
        """Return the share of the free GPUs that is broken up. Empty if nothing is free."""
        free_by_rack: dict[str, int] = {}
        for name, free in self._free.items():
            rack = self._domains[name]["rack"]
            free_by_rack[rack] = free_by_rack.get(rack, 0) + free
        possible = min(DOMAIN_GPUS["rack"], sum(free_by_rack.values()))
        return [1 - max(free_by_rack.values()) / possible] if possible else []

    def _note(self, slices: Sequence[Slice], seen: Seen) -> None:
        gpus = slots.count(slices)
        if gpus <= GPUS:
            return
        for level, most in DOMAIN_GPUS.items():
            num_domains = len({self._domains[part.node_id][level] for part in slices})
            if gpus <= most:
                seen.within[level].append(num_domains == 1)
            if level == "rack":
                seen.num_racks.append(num_domains)

    def _change(self, slices: Sequence[Slice], sign: int) -> None:
        for part in slices:
            self._free[part.node_id] += sign * part.num_workers


def measure(_num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Run the benchmark. Nothing is random, so one round is enough."""
    cells = []
    for load in LOADS:
        for name, (levels, required) in CASES.items():
            seen = Seen()
            for seed in range(NUM_DRAWN):
                seen.add(play(load, seed, levels, required))
            cells.append([f"{load:.0%}", name, *_figures(seen).values()])
            progress(", ".join(cells[-1]))
    columns = ["load", "topology", *_figures(Seen())]
    return Result(
        name="scheduler_locality",
        title="Gangs near together",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[Table("With and without a topology", columns, cells)],
    )


def _figures(seen: Seen) -> Mapping[str, str]:
    def share(values: Sequence[float]) -> str:
        return f"{mean(values):.0%}" if values else ""

    return {
        "within an NVLink domain": share(seen.within["nvlink"]),
        "within a rack": share(seen.within["rack"]),
        "racks of a gang": f"{mean(seen.num_racks):.2f}" if seen.num_racks else "",
        "broken up": share(seen.broken_up),
        "mean wait": f"{mean(seen.waited_s) / 60:.1f} min" if seen.waited_s else "",
    }
