"""The jobs whose steps are timed: one language model, trained by two ranks in several ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dray.spec import JobSpec

NUM_RANKS = 2
BATCH_SIZE, NUM_PIECES = 8, 4
STEPS_PER_BLOCK = 8
NEVER = 10**6
MODEL = {"num_layers": 4, "num_heads": 4, "width": 192, "context_length": 128}
ADAMW = {"name": "adamw", "lr": 1e-3}

WAYS: dict[str, dict[str, Any]] = {
    "fp16 compression": {"sync": {"compression": {"name": "fp16"}}},
    "powersgd": {"sync": {"compression": {"name": "powersgd", "start_step": 2}}},
    "shard, ZeRO 3": {"parallel": {"shard": 2}},
    "shard, ZeRO 2": {"parallel": {"shard": 2, "zero": 2}},
    "tensor": {"parallel": {"tensor": 2}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "context": {"parallel": {"context": 2}},
}


def document(way: str, source: Path, num_steps: int) -> JobSpec:
    train = {
        "epochs": NEVER,
        "max_steps": num_steps,
        "global_batch_size": BATCH_SIZE,
        "optimizer": ADAMW,
        "eval_every_epochs": NEVER,
    }
    if way == "pipeline":
        train["micro_batch_size"] = BATCH_SIZE // NUM_PIECES
    return JobSpec.model_validate(
        {
            "name": "strategies",
            "recipe": "language_model",
            "model": {"name": "gpt", **MODEL},
            "data": {"source": source.as_uri()},
            "train": train,
            "checkpoint": {"every_steps": 10**9},
            "resources": {"num_workers": NUM_RANKS},
            **WAYS[way],
        }
    )
