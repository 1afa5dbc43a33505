"""Throughput of dray's loop on one GPU, compared with a bare program, and the MFU."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.blocks import Times
from benchmarks.gpu.work import PEAK_FLOPS, WORKS
from benchmarks.machine import BenchmarkError
from benchmarks.report import Result, Table
from benchmarks.torchrun import torchrun

GOAL = 1.01
"""Highest ratio of step times: 0.99 of the throughput."""
WARMUP_BLOCKS, PAIRS_PER_ROUND = 4, 2
TIMEOUT_S = 1800.0
WORK = WORKS["gpu"]
METHOD = [
    "One process on one GPU trains the language model "
    + ", ".join(f"{name} {value}" for name, value in WORK.model.items())
    + f" on bytes, with {WORK.batch_size} samples per step, AdamW, bf16 autocast and "
    "`train.compile`. dray's own loop, which reports every step, is compared with a bare "
    "program whose whole model is compiled (`benchmarks/gpu/plain.py`). Both have the samples "
    "on the GPU.",
    f"Blocks of {WORK.steps_per_block} steps alternate (A B B A). The GPU is idle before a block "
    "begins and when its time is measured. The result is the median ratio of neighbouring "
    "blocks with its 95% interval, and the same for two blocks of the same kind.",
    "MFU: the model's own floating point operations per second (`benchmarks/gpu/work.py`), "
    "relative to the dense bf16 throughput in NVIDIA's data sheet.",
]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """BenchmarkError where there is no GPU."""
    if not torch.cuda.is_available():
        raise BenchmarkError("this one needs a GPU")
    name = torch.cuda.get_device_name()
    num_blocks = 2 * (num_rounds * PAIRS_PER_ROUND // 2) + WARMUP_BLOCKS
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        torchrun(
            "benchmarks.gpu.rank", ["gpu", str(num_blocks), home], num_ranks=1, timeout_s=TIMEOUT_S
        )
        found = json.loads(Path(home, "times.json").read_text())
    times = Times.of(found, steps_per_block=WORK.steps_per_block, warmup_blocks=WARMUP_BLOCKS)
    compared = times.comparison("gpt, step, dray / a bare program", goal=GOAL)
    progress(f"{name}: {compared.ratio}")
    rows = [_row(who, statistics.median(each), name) for who, each in _both(times).items()]
    return Result(
        name="gpu",
        title="One GPU",
        method=METHOD,
        rows=times.rows("gpt", peer="a bare program"),
        comparisons=[compared],
        tables=[Table(f"On one {name}", ["", "tokens a second", "MFU"], rows)],
    )


def _both(times: Times) -> dict[str, list[float]]:
    return {"dray": list(times.dray), "a bare program": list(times.plain)}


def _row(who: str, step_s: float, gpu: str) -> list[str]:
    peak = next((flops for kind, flops in PEAK_FLOPS.items() if kind in gpu), None)
    used = "not known" if peak is None else f"{WORK.flops_per_step() / step_s / peak:.1%}"
    return [who, f"{WORK.tokens_per_step / step_s:,.0f}", used]
