"""The language model that is trained on one GPU, in two sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.spec import Gpt, JobSpec

NEVER = 10**6
BYTES = 256


@dataclass(frozen=True)
class Work:
    model: dict[str, Any]
    batch_size: int
    steps_per_block: int
    device: str

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * int(self.model["context_length"])

    def document(self, source: Path, num_steps: int) -> JobSpec:
        """Return a job with bf16 and compilation that does not evaluate or save while it is
        timed."""
        return JobSpec.model_validate(
            {
                "name": "gpu",
                "recipe": "language_model",
                "model": {"name": "gpt", **self.model},
                "data": {"source": source.as_uri()},
                "train": {
                    "epochs": NEVER,
                    "max_steps": num_steps,
                    "global_batch_size": self.batch_size,
                    "optimizer": {"name": "adamw", "lr": 3e-4},
                    "precision": "bf16",
                    "compile": True,
                    "eval_every_epochs": NEVER,
                },
                "checkpoint": {"every_steps": 10**9},
                "resources": {"gpus_per_worker": 1 if self.device == "cuda" else 0},
            }
        )

    def flops_per_step(self) -> float:
        """Return the floating point operations of the model itself: 6 per matrix weight and token,
        and 12 x width x visible positions for attention, where half of the positions are visible
        (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). Recomputed operations count once."""
        model = Gpt.model_validate({"name": "gpt", **self.model})
        weights = model.num_layers * 12 * model.width**2 + model.width * BYTES
        attention = model.num_layers * model.width * model.context_length / 2
        return self.tokens_per_step * (6.0 * weights + 12.0 * attention)


WORKS = {
    "gpu": Work(
        {"num_layers": 12, "num_heads": 12, "width": 768, "context_length": 1024}, 32, 20, "cuda"
    ),
    "small": Work(
        {"num_layers": 2, "num_heads": 2, "width": 32, "context_length": 32}, 8, 4, "cpu"
    ),
}
"""`small` is for testing the programs without a GPU. Its times are meaningless."""
PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
"""Dense bf16 operations per second according to NVIDIA's data sheets, for the SXM variant if there
are two. The first entry whose name is part of the GPU's name is used."""
