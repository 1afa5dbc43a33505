"""The job, as a recipe and as a script that trains the same model in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from benchmarks.first_step import plain

NUM_RANKS: Final = 2


PLAIN_SCRIPT: Final = plain.__file__


def recipe_job() -> dict[str, Any]:
    return {
        "name": "first-step-recipe",
        "recipe": "image_classification",
        "model": {"name": "cnn", "width": plain.WIDTH},
        "data": {"source": "sklearn://digits"},
        "train": {
            "max_steps": plain.NUM_STEPS,
            "epochs": 10,
            "global_batch_size": plain.GLOBAL_BATCH_SIZE,
            "optimizer": {"name": "adamw", "lr": plain.LR},
        },
        "resources": {"num_workers": NUM_RANKS},
        "max_retries": 0,
    }


def script_job(folder: Path) -> dict[str, Any]:
    """Return a job whose script writes its times to `folder`."""
    return {
        "name": "first-step-script",
        "script": {"entrypoint": PLAIN_SCRIPT, "args": [str(folder)]},
        "resources": {"num_workers": NUM_RANKS},
        "max_retries": 0,
    }
