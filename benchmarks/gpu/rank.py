"""The process of the measurement: both loops, block by block. It needs neither Ray nor a service.

torchrun --nproc-per-node 1 -m benchmarks.gpu.rank gpu 24 folder
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from benchmarks.equality.work import write_text
from benchmarks.gpu.plain import PlainLoop
from benchmarks.gpu.work import WORKS, Work
from benchmarks.step_time.rank import AlternatingLoop, alternate, rank_task
from ray_workers.recipes import RECIPES
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.process import rank_main

NUM_SENTENCES = 60_000
"""Nearly two megabytes."""
BATCHES = 46
"""In an epoch, and no smaller one at its end, which the bare program would leave out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    work = WORKS[options.work]
    text = write_text(options.folder, NUM_SENTENCES)
    _cut(text, work)
    # One step more than is timed: after the last one the model is evaluated and saved.
    spec = work.document(text, options.num_blocks * work.steps_per_block + 1)
    task = rank_task(spec, 0, 1, options.folder, device=work.device)
    os.environ.update(rank_main.environment(task, spec))
    workload, plain = (
        RECIPES["language_model"].build(spec, DataPolicy.open())
        for _ in ("dray's", "the plain loop's")
    )
    device = torch.device(work.device)
    loop = AlternatingLoop(
        task, spec, workload, lambda: PlainLoop(plain, spec.train, device), work.steps_per_block
    )
    alternate(loop, options.folder)


def _cut(text: Path, work: Work) -> None:
    """Cut the text to as many windows as give whole batches, with a fifth of all for validation."""
    num_windows = BATCHES * work.batch_size * 5 // 4
    num_bytes = num_windows * int(work.model["context_length"]) + 1
    content = text.read_bytes()
    assert len(content) >= num_bytes, "the text is too short"
    text.write_bytes(content[:num_bytes])


if __name__ == "__main__":
    main()
