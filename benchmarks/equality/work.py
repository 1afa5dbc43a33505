"""A small language model, and all compared ways to divide it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Mesh = tuple[int, dict[str, Any]]
"""(number of ranks, the axes of `parallel` that are greater than 1). `data` is the remaining
factor."""


def _alone(size: int) -> dict[str, Mesh]:
    """Return meshes with one axis, or one way to use it."""
    stages = {"pipeline": size, "stages_per_rank": 2}
    ways: dict[str, dict[str, Any]] = {
        "data": {},
        "shard": {"shard": size},
        "shard, ZeRO 1": {"shard": size, "zero": 1},
        "shard, ZeRO 2": {"shard": size, "zero": 2},
        "tensor": {"tensor": size},
        "context": {"context": size},
        "pipeline": {"pipeline": size},
        "pipeline, GPipe": {"pipeline": size, "schedule": "gpipe"},
        "pipeline, interleaved": {**stages, "schedule": "interleaved"},
        "pipeline, zero bubble": {**stages, "schedule": "zero_bubble"},
    }
    return {_name(way, size): (size, parallel) for way, parallel in ways.items()}


def _pairs(size: int) -> dict[str, Mesh]:
    """Return meshes with two axes: the first is 2, and the second is the remaining factor."""
    left = size // 2
    stages = {"pipeline": left, "stages_per_rank": 2}
    ways: dict[str, dict[str, Any]] = {
        "data x shard": {"shard": left},
        "data x shard, ZeRO 1": {"shard": left, "zero": 1},
        "data x tensor": {"tensor": left},
        "data x context": {"context": left},
        "data x pipeline": {"pipeline": left},
        "data x pipeline, interleaved": {**stages, "schedule": "interleaved"},
        "data x pipeline, zero bubble": {**stages, "schedule": "zero_bubble"},
        "shard x tensor": {"shard": 2, "tensor": left},
        "shard x context": {"shard": 2, "context": left},
        "shard x pipeline": {"shard": 2, "pipeline": left},
        "tensor x context": {"tensor": 2, "context": left},
        "tensor x pipeline": {"tensor": 2, "pipeline": left},
        "context x pipeline": {"context": 2, "pipeline": left},
    }
    return {_name(way, left): (size, parallel) for way, parallel in ways.items()}


def _name(way: str, size: int) -> str:
    return way if size == 2 else f"{way} {size}"


MESHES: dict[str, Mesh] = {
    **_alone(2),
    **_alone(4),
    **_pairs(4),
    **_alone(8),
    **_pairs(8),
    "data x shard x tensor": (8, {"shard": 2, "tensor": 2}),
    "data x tensor x pipeline": (8, {"tensor": 2, "pipeline": 2}),
    "data x shard x pipeline": (8, {"shard": 2, "pipeline": 2}),
    "shard x tensor x pipeline": (8, {"shard": 2, "tensor": 2, "pipeline": 2}),
    "shard x tensor x context": (8, {"shard": 2, "tensor": 2, "context": 2}),
    "tensor x pipeline x context": (8, {"tensor": 2, "pipeline": 2, "context": 2}),
}
NUM_LAYERS, NUM_HEADS = 4, 4
"""Minimum size of the model, which is larger for more stages, or more ranks along tensor and
context."""

NUM_STEPS = 20


def write_text(folder: Path, num_sentences: int = 700) -> Path:
    source = folder / "text.txt"
    source.write_text(" ".join(f"{n} times {n} is {n * n}." for n in range(num_sentences)))
    return source


def model_for(parallel: dict[str, Any]) -> dict[str, Any]:
    num_stages = parallel.get("pipeline", 1) * parallel.get("stages_per_rank", 1)
    num_heads = max(NUM_HEADS, parallel.get("tensor", 1) * parallel.get("context", 1))
    return {
        "name": "gpt",
        "num_layers": max(NUM_LAYERS, num_stages),
        "num_heads": num_heads,
        "width": 24 if num_heads == NUM_HEADS else 4 * num_heads,
        "context_length": 32,
    }


def document(source: Path, num_workers: int, parallel: dict[str, Any], **train: Any) -> Any:
    """Return a job with 20 steps, slightly more than an epoch, so that it includes a short
    batch."""
    return {
        "recipe": "language_model",
        "model": model_for(parallel),
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
