"""A small language model, and every way to divide it that is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Mesh = tuple[int, dict[str, Any]]
"""(ranks, the axes of `parallel` above 1); `data` is what is left."""

INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero_bubble", "stages_per_rank": 2}

MESHES: dict[str, Mesh] = {
    "data": (2, {}),
    "shard": (2, {"shard": 2}),
    "shard, ZeRO 1": (2, {"shard": 2, "zero": 1}),
    "shard, ZeRO 2": (2, {"shard": 2, "zero": 2}),
    "tensor": (2, {"tensor": 2}),
    "context": (2, {"context": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "pipeline, GPipe": (2, {"pipeline": 2, "schedule": "gpipe"}),
    "pipeline, interleaved": (2, INTERLEAVED),
    "pipeline, zero bubble": (2, ZERO_BUBBLE),
    "data 4": (4, {}),
    "shard 4": (4, {"shard": 4}),
    "tensor 4": (4, {"tensor": 4}),
    "context 4": (4, {"context": 4}),
    "pipeline 4": (4, {"pipeline": 4}),
    "data x shard": (4, {"shard": 2}),
    "data x shard, ZeRO 1": (4, {"shard": 2, "zero": 1}),
    "data x tensor": (4, {"tensor": 2}),
    "data x context": (4, {"context": 2}),
    "data x pipeline": (4, {"pipeline": 2}),
    "data x pipeline, interleaved": (4, INTERLEAVED),
    "data x pipeline, zero bubble": (4, ZERO_BUBBLE),
    "shard x tensor": (4, {"shard": 2, "tensor": 2}),
    "shard x context": (4, {"shard": 2, "context": 2}),
    "shard x pipeline": (4, {"shard": 2, "pipeline": 2}),
    "tensor x context": (4, {"tensor": 2, "context": 2}),
    "tensor x pipeline": (4, {"tensor": 2, "pipeline": 2}),
    "context x pipeline": (4, {"context": 2, "pipeline": 2}),
    "data 8": (8, {}),
    "shard 8": (8, {"shard": 8}),
    "data x shard 4": (8, {"shard": 4}),
    "data x shard x tensor": (8, {"shard": 2, "tensor": 2}),
    "data x tensor x pipeline": (8, {"tensor": 2, "pipeline": 2}),
    "data x shard x pipeline": (8, {"shard": 2, "pipeline": 2}),
    "shard x tensor x pipeline": (8, {"shard": 2, "tensor": 2, "pipeline": 2}),
    "shard x tensor x context": (8, {"shard": 2, "tensor": 2, "context": 2}),
    "tensor x pipeline x context": (8, {"tensor": 2, "pipeline": 2, "context": 2}),
}

NUM_STEPS = 20


def write_text(folder: Path, num_sentences: int = 700) -> Path:
    source = folder / "text.txt"
    source.write_text(" ".join(f"{n} times {n} is {n * n}." for n in range(num_sentences)))
    return source


def document(source: Path, num_workers: int, parallel: dict[str, Any], **train: Any) -> Any:
    """A job of 20 steps over a little more than an epoch, so that a short batch is among them."""
    model = {"num_layers": 4, "num_heads": 4, "width": 24, "context_length": 32}
    return {
        "recipe": "language_model",
        "model": {"name": "gpt", **model},
        "data": {"source": source.as_uri()},
        "train": {
            "global_batch_size": 24,
            "epochs": 2,
            "max_steps": NUM_STEPS,
            "optimizer": {"name": "adamw", "lr": 0.002, "weight_decay": 0.1, "eps": 1e-4},
            "max_grad_norm": 0.5,
            **train,
        },
        "resources": {"num_workers": num_workers},
        "parallel": parallel,
    }
