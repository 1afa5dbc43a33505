"""The accuracy of a small batch, and of one 32 times as large with and without the rules for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.accuracy import compared, digits_accuracy
from benchmarks.report import Result

SMALL, LARGE = 8, 256
EPOCHS, LR, LAMB_LR, WARMUP_STEPS = 20, 0.005, 0.0035, 20
SEEDS = range(5)
GOAL_POINTS = 0.5
SGD = {"name": "sgd", "lr": LR, "momentum": 0.9}
SCALED = {"lr_scaling": {"rule": "linear", "reference_batch_size": SMALL}}
LAMB = {"name": "lamb", "lr": LAMB_LR}
BY_ROOT = {"lr_scaling": {"rule": "sqrt", "reference_batch_size": SMALL}}
COSINE = {"name": "cosine"}
WARM = {"name": "cosine", "warmup_steps": WARMUP_STEPS}

CONTENDERS: dict[str, tuple[dict[str, Any], bool | None]] = {
    f"batch {SMALL}, sgd": (
        {"global_batch_size": SMALL, "optimizer": SGD, "schedule": COSINE},
        None,
    ),
    f"batch {LARGE}, sgd as it was": ({"optimizer": SGD, "schedule": COSINE}, False),
    f"batch {LARGE}, sgd, scaled": ({"optimizer": SGD, "schedule": COSINE, **SCALED}, False),
    f"batch {LARGE}, sgd, scaled, warm-up": (
        {"optimizer": SGD, "schedule": WARM, **SCALED},
        None,
    ),
    f"batch {LARGE}, lamb as it was": ({"optimizer": LAMB, "schedule": COSINE}, False),
    f"batch {LARGE}, lamb, scaled": ({"optimizer": LAMB, "schedule": COSINE, **BY_ROOT}, None),
    f"batch {LARGE}, lamb, scaled, warm-up": (
        {"optimizer": LAMB, "schedule": WARM, **BY_ROOT},
        True,
    ),
}
"""(`train`, whether it is to come within the goal; None where nothing is claimed)."""
METHOD = [
    f"A cnn of width 16 is trained on `sklearn://digits` for {EPOCHS} epochs in one process, "
    f"with seeds 0 to {len(SEEDS) - 1}, which also determine the validation split. The small "
    f"batch has {SMALL} samples per step and a learning rate of {LR} with cosine decay. The "
    f"large batch has {LARGE} samples per step, and therefore fewer steps. 'scaled' multiplies "
    f"the rate by the ratio of the batch sizes or, for lamb, whose rate is {LAMB_LR}, by its "
    "square root (`lr_scaling` linear and sqrt, as proposed by their authors). Warm-up takes "
    f"{WARMUP_STEPS} steps.",
    "The table shows the validation accuracy in percent. The goal is a mean over the seeds that "
    f"is within {GOAL_POINTS} points of the small batch. Without the rules, a large batch must "
    "miss this goal.",
]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """One run for each seed: accuracy does not vary with time, so `num_rounds` is not used."""
    claimed = {name: claim for name, (_, claim) in CONTENDERS.items()}
    return compared(
        "large_batch",
        "A batch 32 times as large",
        METHOD,
        claimed,
        _accuracy,
        SEEDS,
        GOAL_POINTS,
        progress,
    )


def _accuracy(name: str, seed: int) -> float:
    train, _ = CONTENDERS[name]
    options = {"epochs": EPOCHS, "global_batch_size": LARGE, **train}
    return digits_accuracy({"train": options}, seed)
