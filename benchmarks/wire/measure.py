"""Bytes that a rank sends in a step, with each compression against none."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.equality.work import write_text
from benchmarks.report import Result, Table
from benchmarks.torchrun import train
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import SENT_BYTES
from ray_workers.shared.frames import MetricsReport
from service.ingest.decoding import decode

NUM_RANKS, NUM_STEPS, FIRST_STEP = 4, 8, 5
"""Steps before FIRST_STEP are not measured: those of PowerSGD are exact."""
TIMEOUT_S = 900.0
MOST_SPOOL_BYTES = 64 << 20
DENSE = "none"
CONTENDERS: dict[str, tuple[dict[str, Any] | None, float | None]] = {
    DENSE: (None, None),
    "fp16": ({"name": "fp16"}, 1 / 2),
    "bf16": ({"name": "bf16"}, 1 / 2),
    "powersgd, rank 2": ({"name": "powersgd", "rank": 2, "start_step": 3}, 1 / 20),
    "topk, 0.1%": ({"name": "topk", "ratio": 0.001}, 1 / 200),
}
"""(`sync.compression`, at most which part of what is sent without it)."""
SHAPES = (
    "embedding 256 x 512; in each of 8 layers 1536 x 512, 512 x 512, 2048 x 512 and 512 x 2048 "
    "with their biases and two norms; head 256 x 512: 25.5 million elements"
)
METHOD = [
    f"The language model of 8 layers of width 512 ({SHAPES}) is trained on CPU over gloo by "
    f"{NUM_RANKS} ranks, each with one sample of 32 bytes per step.",
    f"The figure is the median of rank 0's `perf/sent_bytes` over steps {FIRST_STEP} to "
    f"{NUM_STEPS}: the bytes that the kernel has sent through the sockets of the process group "
    "(TCP_INFO). The goals allow 1% more, for message headers, the loss, and biases that are "
    "not compressed.",
]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """One run of each is enough: it is not a time. `num_rounds` is not used."""
    sent: dict[str, float] = {}
    rows = []
    for name, (compression, goal) in CONTENDERS.items():
        sent[name] = _median_sent(compression)
        part = sent[name] / sent[DENSE]
        met = "" if goal is None else "yes" if part <= 1.01 * goal else "no"
        at_most = "" if goal is None else f"1/{1 / goal:g}"
        rows.append([name, f"{sent[name]:,.0f}", f"1/{1 / part:.1f}", at_most, met])
        progress(" | ".join(rows[-1]))
    columns = ["compression", "bytes a step", "of none", "goal, at most", "met"]
    return Result(
        name="wire",
        title="Bytes on the wire",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[Table("Sent by rank 0 in a step", columns, rows)],
    )


def _median_sent(compression: dict[str, Any] | None) -> float:
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        folder = Path(home)
        document = job(folder, {"compression": compression}, NUM_RANKS, NUM_RANKS, NUM_STEPS)
        train(document, folder, num_ranks=NUM_RANKS, timeout_s=TIMEOUT_S)
        content = spool_reader.read(folder / "spool-0", 0, MOST_SPOOL_BYTES)
        frames = spool_reader.decode("r0.0.metrics", content)
        sent = {
            report.step: report.values[SENT_BYTES]
            for report in map(decode, frames)
            if isinstance(report, MetricsReport) and SENT_BYTES in report.values
        }
    return statistics.median(sent[step] for step in range(FIRST_STEP, NUM_STEPS + 1))


def job(
    folder: Path, sync: dict[str, Any], num_ranks: int, batch_size: int, num_steps: int
) -> dict[str, Any]:
    """The document; its text is written into the folder."""
    return {
        "recipe": "language_model",
        "model": {"num_layers": 8, "num_heads": 8, "width": 512, "context_length": 32},
        "data": {"source": write_text(folder).as_uri(), "validation_fraction": 0.01},
        "train": {
            "global_batch_size": batch_size,
            "max_steps": num_steps,
            "optimizer": {"name": "sgd", "lr": 0.01, "momentum": 0.9},
        },
        "sync": sync,
        "resources": {"num_workers": num_ranks},
    }
