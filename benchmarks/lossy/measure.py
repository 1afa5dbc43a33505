"""Accuracy of jobs that compress their gradients, compared with a job that sends them unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.accuracy import compared, digits_accuracy
from benchmarks.report import Result

NUM_RANKS = 2
SEEDS = range(5)
GOAL_POINTS = 0.5
TRAIN = {
    "epochs": 20,
    "global_batch_size": 32,
    "optimizer": {"name": "sgd", "lr": 0.02, "momentum": 0.9},
    "schedule": {"name": "cosine", "warmup_steps": 45},
}
ADAMW = {"optimizer": {"name": "adamw", "lr": 0.001}}
CONTENDERS: dict[str, tuple[dict[str, Any] | None, bool | None]] = {
    "every gradient as it is": (None, None),
    "fp16": ({"compression": {"name": "fp16"}}, True),
    "bf16": ({"compression": {"name": "bf16"}}, True),
    "powersgd, rank 2": ({"compression": {"name": "powersgd", "rank": 2}}, True),
    "topk, 1%": ({"compression": {"name": "topk", "ratio": 0.01}}, True),
    "topk, 0.1%": ({"compression": {"name": "topk", "ratio": 0.001}}, None),
    "topk, 0.1%, after four epochs of warm-up": (
        {"compression": {"name": "topk", "ratio": 0.001, "warmup_steps": 180}},
        True,
    ),
    "local SGD, every 8 steps": ({"every": 8}, True),
    "DiLoCo, every 8 steps": ({"every": 8, "outer": {}}, None),
    "DiLoCo, every 8 steps, with adamw": ({"every": 8, "outer": {}}, True),
}
"""(`sync`, whether it is claimed to come within the goal; None where nothing is claimed)."""
METHOD = [
    f"{NUM_RANKS} ranks train a cnn of width 16 on `sklearn://digits` for 20 epochs in batches "
    "of 32, with sgd, momentum 0.9, and a learning rate of 0.02 with warm-up over one epoch and "
    "then cosine decay. All contenders use these settings, except where adamw with a rate of "
    f"0.001 is stated, the inner optimizer of DiLoCo's authors. Seeds 0 to {len(SEEDS) - 1} also "
    "determine the validation split of 359 images, so that one image is 0.28 points.",
    "The table shows the validation accuracy in percent. The goal is a mean over the seeds that "
    f"is within {GOAL_POINTS} points of the job that sends every gradient unchanged.",
]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """One run for each seed: accuracy does not vary with time, so `num_rounds` is not used."""
    claimed = {name: claim for name, (_, claim) in CONTENDERS.items()}
    return compared(
        "lossy",
        "What is learned where not everything is sent",
        METHOD,
        claimed,
        _accuracy,
        SEEDS,
        GOAL_POINTS,
        progress,
    )


def _accuracy(name: str, seed: int) -> float:
    sync, _ = CONTENDERS[name]
    train = TRAIN | ADAMW if name.endswith("adamw") else TRAIN
    return digits_accuracy({"train": train, "sync": sync}, seed, NUM_RANKS)
