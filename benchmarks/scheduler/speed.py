"""How long one plan of the policy takes, and how that grows with the jobs that wait."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from statistics import median

from benchmarks.report import Result, Row, Table
from benchmarks.scheduler import snapshots
from service.domain.scheduling import policy

SIZES = (1_000, 10_000, 100_000)
METHOD = (
    f"{snapshots.NUM_NODES:,} nodes with {snapshots.GPUS_PER_NODE} GPUs, of which "
    f"{snapshots.FULL:.0%} are held. Jobs of mixed sizes wait in four queues with quotas and "
    "limits, some of them elastic, held, in arrays, after others, or backing off. Each round draws "
    "another snapshot by its seed.",
    "Timed is `service.domain.scheduling.policy.plan` alone, as the service calls it: one decision "
    "and one sentence for each job. Python's garbage collector runs as it does by default.",
    "Growth is the time per job times log n, over that of the size before: 1 is n log n.",
)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    samples = {size: _times(size, num_rounds, progress) for size in SIZES}
    rows = [Row(f"{size:,} waiting jobs", times) for size, times in samples.items()]
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
        tables=[Table("By the length of the queue", columns, cells)],
    )


def _scaled(before: int, size: int) -> float:
    return size * math.log(size) / (before * math.log(before))


def _times(num_waiting: int, num_rounds: int, progress: Callable[[str], None]) -> list[float]:
    """Seconds of each round; one before them warms up."""
    times = [_seconds(snapshots.drawn(num_waiting, seed)) for seed in range(num_rounds + 1)][1:]
    progress(f"{num_waiting:,} waiting: {median(times) * 1e3:.1f} ms")
    return times


def _seconds(snapshot: policy.Snapshot) -> float:
    gc.collect()
    began = time.perf_counter()
    policy.plan(snapshot, snapshots.NOW)
    return time.perf_counter() - began
