"""The accuracy of a small batch, and of one 32 times as large with and without the rules for it."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import torchrun
from benchmarks.report import Result, Table

SMALL, LARGE = 8, 256
EPOCHS, LR, WARMUP_STEPS = 20, 0.005, 20
SEEDS = range(5)
GOAL_POINTS = 0.5
TIMEOUT_S = 600.0
SGD = {"name": "sgd", "lr": LR, "momentum": 0.9}
SCALED = {"lr_scaling": {"rule": "linear", "reference_batch_size": SMALL}}
COSINE = {"name": "cosine"}
WARM = {"name": "cosine", "warmup_steps": WARMUP_STEPS}

REFERENCE = f"batch {SMALL}, sgd"
CONTENDERS: dict[str, tuple[dict[str, Any], bool | None]] = {
    REFERENCE: ({"global_batch_size": SMALL, "optimizer": SGD, "schedule": COSINE}, None),
    f"batch {LARGE}, sgd as it was": ({"optimizer": SGD, "schedule": COSINE}, False),
    f"batch {LARGE}, sgd, scaled": ({"optimizer": SGD, "schedule": COSINE, **SCALED}, False),
    f"batch {LARGE}, sgd, scaled, warm-up": (
        {"optimizer": SGD, "schedule": WARM, **SCALED},
        None,
    ),
    f"batch {LARGE}, lamb, warm-up": (
        {"optimizer": {"name": "lamb", "lr": 0.02}, "schedule": WARM},
        True,
    ),
}
"""(`train`, whether it is to come within the goal; None where nothing is claimed)."""
METHOD = [
    f"A cnn of width 16 learns `sklearn://digits` for {EPOCHS} epochs in one process, with seeds "
    f"0 to {len(SEEDS) - 1}, which also choose the validation split: {SMALL} samples in a step, "
    f"with a rate of {LR} that falls by a cosine; and {LARGE}, with as few steps as come of it. "
    "Scaled is the rate times the ratio of the batches (`lr_scaling: linear`), warm-up is over "
    f"{WARMUP_STEPS} steps, lamb's rate is 0.02.",
    "Told is the accuracy on the validation split in percent. The goal is to be within "
    f"{GOAL_POINTS} points of the small batch, by the mean over the seeds; without the rules a "
    "large batch must miss it.",
]


def measure(num_rounds: int, tell: Callable[[str], None]) -> Result:
    """As many runs as there are seeds: it is not a time. `num_rounds` is not used."""
    found: dict[str, list[float]] = {}
    rows = []
    for name, (train, expected) in CONTENDERS.items():
        found[name] = [_accuracy(train, seed) for seed in SEEDS]
        mean = statistics.mean(found[name])
        short = statistics.mean(found[REFERENCE]) - mean
        within = "" if name == REFERENCE else "yes" if short <= GOAL_POINTS else "no"
        claimed = {None: "", True: "yes", False: "no"}[expected]
        each = ", ".join(f"{value:.1f}" for value in found[name])
        rows.append([name, f"{mean:.2f}", each, f"{-short:+.2f}", within, claimed])
        tell(" | ".join(rows[-1]))
    columns = ["", "mean", "each seed", "points", "within the goal", "claimed"]
    return Result(
        name="large_batch",
        title="A batch 32 times as large",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[Table("Accuracy on the validation split, %", columns, rows)],
        raw={name: list(values) for name, values in found.items()},
    )


def _accuracy(train: dict[str, Any], seed: int) -> float:
    document = {
        "recipe": "image_classification",
        "data": {"source": "sklearn://digits"},
        "model": {"name": "cnn", "width": 16},
        "train": {
            "epochs": EPOCHS,
            "eval_every_epochs": EPOCHS,
            "global_batch_size": LARGE,
            "seed": seed,
            **train,
        },
    }
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        torchrun.train(document, Path(home), num_ranks=1, timeout_s=TIMEOUT_S)
        (metrics,) = Path(home).rglob("metrics.json")
        return 100 * float(json.loads(metrics.read_text())["val/accuracy"])
