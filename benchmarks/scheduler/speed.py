"""How long one plan of the policy takes, and how this grows with the number of waiting jobs."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

from benchmarks.report import Result, Row, Table
from benchmarks.scheduler import snapshots
from service.domain.scheduling import policy

Progress = Callable[[str], None]
SIZES = (1_000, 10_000, 100_000)
TOPOLOGY_SIZE = 10_000
TOPOLOGIES = {"none requires a level": 0.0, "5% of the gangs require a rack": 0.05}
RULES_SIZE = 10_000
NUM_RESERVATIONS, NUM_QUEUES = 1_000, 100
METHOD = (
    f"{snapshots.FULL:.0%} of the GPUs of {snapshots.NUM_NODES:,} nodes with "
    f"{snapshots.GPUS_PER_NODE} GPUs are in use. Jobs of different sizes wait in four queues "
    "with quotas and limits. Some of them are elastic, held, in arrays, dependent on other "
    "jobs, or backing off. Each round draws a different snapshot with its seed.",
    "Only `service.domain.scheduling.policy.plan` is timed, called in the same way as by the "
    "service: one decision and one sentence for each job. Python's garbage collector has its "
    "default settings.",
    "With a topology, the nodes are in 2 zones, racks of 16 nodes, and NVLink domains of 4 nodes.",
    f"The {NUM_RESERVATIONS:,} reservations are for 1 to 8 nodes each, and begin in the next four "
    "weeks. In the snapshots with and without them, half of the jobs have a limit, and each limit "
    "is different.",
    f"The tree of {NUM_QUEUES} queues has up to four levels. Half of its queues have a quota, and "
    "a quarter of them also keep part of their quota for themselves.",
    "Growth is the time relative to n log n growth from the previous size: 1 means n log n.",
)


def measure(num_rounds: int, progress: Progress) -> Result:
    samples = {
        size: _times(num_rounds, progress, f"{size:,} waiting", partial(snapshots.drawn, size))
        for size in SIZES
    }
    with_topology = {
        name: _times(num_rounds, progress, name, partial(_racked, share))
        for name, share in TOPOLOGIES.items()
    }
    with_rules = {
        name: _times(num_rounds, progress, name, drawn)
        for name, drawn in (
            ("limits", partial(_reserved, 0)),
            (f"limits and {NUM_RESERVATIONS:,} reservations", partial(_reserved, NUM_RESERVATIONS)),
            (f"a tree of {NUM_QUEUES} queues", _in_tree),
        )
    }
    rows = [Row(f"{size:,} waiting jobs", times) for size, times in samples.items()]
    rows += [Row(name, times) for name, times in (with_topology | with_rules).items()]
    cells = []
    for before, size in zip((None, *SIZES), SIZES, strict=False):
        took = median(samples[size])
        growth = (
            ""
            if before is None
            else f"{took / median(samples[before]) / _scaled(before, size):.2f}"
        )
        cells.append([f"{size:,}", f"{took * 1e3:.1f} ms", f"{took / size * 1e6:.1f} us", growth])
    columns = ["waiting jobs", "median", "per job", "growth over n log n"]
    return Result(
        name="scheduler_speed",
        title="One plan of the scheduler",
        method=METHOD,
        rows=rows,
        comparisons=[],
        tables=[
            Table("By the length of the queue", columns, cells),
            _compared(
                f"With a topology, {TOPOLOGY_SIZE:,} waiting jobs",
                samples[TOPOLOGY_SIZE],
                with_topology,
            ),
            _compared(
                f"With other rules, {RULES_SIZE:,} waiting jobs", samples[RULES_SIZE], with_rules
            ),
        ],
    )


def _scaled(before: int, size: int) -> float:
    return size * math.log(size) / (before * math.log(before))


def _compared(
    title: str, without: Sequence[float], samples: Mapping[str, Sequence[float]]
) -> Table:
    cells = [
        [name, f"{median(times) * 1e3:.1f} ms", f"{median(times) / median(without):.2f}"]
        for name, times in samples.items()
    ]
    return Table(title, ["jobs", "median", "over none"], cells)


def _racked(share_required: float, seed: int) -> policy.Snapshot:
    return snapshots.racked(snapshots.drawn(TOPOLOGY_SIZE, seed), share_required)


def _reserved(number: int, seed: int) -> policy.Snapshot:
    return snapshots.reserved(snapshots.drawn(RULES_SIZE, seed), number)


def _in_tree(seed: int) -> policy.Snapshot:
    return snapshots.in_tree(snapshots.drawn(RULES_SIZE, seed), NUM_QUEUES)


def _times(
    num_rounds: int, progress: Progress, name: str, drawn: Callable[[int], policy.Snapshot]
) -> list[float]:
    """Return the seconds of each round, after one warm-up round."""
    times = [_seconds(drawn(seed)) for seed in range(num_rounds + 1)][1:]
    progress(f"{name}: {median(times) * 1e3:.1f} ms")
    return times


def _seconds(snapshot: policy.Snapshot) -> float:
    gc.collect()
    began = time.perf_counter()
    policy.plan(snapshot, snapshots.NOW)
    return time.perf_counter() - began
