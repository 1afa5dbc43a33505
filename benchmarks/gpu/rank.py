"""The measuring process: runs both loops in alternating blocks, without Ray or a service.

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
"""Results in almost two megabytes."""
BATCHES = 46
"""Batches per epoch. There is no smaller batch at the end, because the bare program would skip
it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("num_blocks", type=int)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    work = WORKS[options.work]
    text = write_text(options.folder, NUM_SENTENCES)
    _cut(text, work)
    # One more step than is timed, because the model is evaluated and saved after the last one.
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
    """Truncate the text to a number of windows that results in full batches, with a fifth for
    validation."""
    num_windows = BATCHES * work.batch_size * 5 // 4
    num_bytes = num_windows * int(work.model["context_length"]) + 1
    content = text.read_bytes()
    assert len(content) >= num_bytes, "the text is too short"
    text.write_bytes(content[:num_bytes])


if __name__ == "__main__":
    main()
