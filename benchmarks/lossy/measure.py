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
    f"{NUM_RANKS} ranks teach a cnn of width 16 `sklearn://digits`: 20 epochs of batches of 32, "
    "sgd with momentum 0.9, a rate of 0.02 with a warm-up over one epoch and a cosine after it, "
    "the same for all (but adamw with a rate of 0.001 where it says so, as DiLoCo's authors have "
    f"inside); seeds 0 to {len(SEEDS) - 1}, which also choose the validation split of 359 "
    "images, so that one image is 0.28 points.",
    "Shown is the accuracy on the validation split in percent. The goal is to be within "
    f"{GOAL_POINTS} points of the job that sends every gradient as it is, by the mean over the "
    "seeds.",
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
