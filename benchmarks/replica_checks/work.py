"""The job whose replicas are compared."""

from __future__ import annotations

from typing import Final

from benchmarks.step_time.work import NEVER, NUM_RANKS
from dray.spec import JobSpec

STEPS_PER_BLOCK: Final = 100
INTERVALS: Final = (1, 10, 100)
"""Values of `check.replicas_every`."""


def spec_of(every: int, num_steps: int) -> JobSpec:
    """Return the document of a job with steps of about 20 ms and 8 million parameters."""
    return JobSpec.model_validate(
        {
            "name": f"replica-checks-{every}",
            "recipe": "image_classification",
            "model": {"name": "mlp", "width": 2048, "num_layers": 3},
            "train": {
                "epochs": NEVER,
                "max_steps": num_steps,
                "global_batch_size": 32,
                "optimizer": {"name": "adamw", "lr": 1e-3},
                "eval_every_epochs": NEVER,
            },
            "checkpoint": {"every_steps": 10**9},
            "check": {"replicas_every": every},
            "resources": {"num_workers": NUM_RANKS},
        }
    )
