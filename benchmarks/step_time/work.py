"""The jobs whose steps are timed. Sizes are chosen for a core of a current server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from dray.spec import JobSpec

NUM_RANKS: Final = 2
NEVER: Final = 10**6


@dataclass(frozen=True)
class Work:
    """A job, and how its steps are divided into equal blocks of whole epochs."""

    name: str
    model: dict[str, Any]
    global_batch_size: int
    epochs_per_block: int
    pairs_per_round: int

    def spec(self, num_steps: int) -> JobSpec:
        """Return the document for `num_steps` steps, with evaluation and saving only after the last
        step."""
        return JobSpec.model_validate(
            {
                "name": f"step-time-{self.name}",
                "recipe": "image_classification",
                "model": self.model,
                "train": {
                    "epochs": NEVER,
                    "max_steps": num_steps,
                    "global_batch_size": self.global_batch_size,
                    "optimizer": {"name": "adamw", "lr": 1e-3},
                    "eval_every_epochs": NEVER,
                },
                "checkpoint": {"every_steps": 10**9},
                "resources": {"num_workers": NUM_RANKS},
            }
        )


WORKS: Final = {
    work.name: work
    for work in (
        Work("2 ms", {"name": "cnn", "width": 8}, 32, epochs_per_block=2, pairs_per_round=20),
        Work("100 ms", {"name": "cnn", "width": 64}, 512, epochs_per_block=2, pairs_per_round=8),
    )
}
