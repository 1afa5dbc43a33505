"""The job that every contender starts: the same model, data, batch and optimizer."""

from __future__ import annotations

from typing import Any, Final

NUM_RANKS: Final = 2

JOB: Final[dict[str, Any]] = {
    "name": "first-step",
    "recipe": "image_classification",
    "model": {"name": "cnn"},
    "data": {"source": "sklearn://digits"},
    "train": {
        "max_steps": 40,
        "epochs": 10,
        "global_batch_size": 64,
        "optimizer": {"name": "adamw", "lr": 1e-3},
    },
    "resources": {"num_workers": NUM_RANKS},
    "max_retries": 0,
}
