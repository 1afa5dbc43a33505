"""The jobs whose steps are timed: one language model, trained in every supported way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray.spec import JobSpec

BATCH_SIZE, NUM_PIECES = 8, 4
STEPS_PER_BLOCK = 8
NEVER = 10**6
MODEL = {"num_layers": 4, "num_heads": 4, "width": 192, "context_length": 128}
ADAMW = {"name": "adamw", "lr": 1e-3}
TOP_K_RATIO = 0.001
AGREE_EVERY = 4
"""Number of steps that ranks take independently."""
STAGES_PER_RANK = 2
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class Way:
    """One way to train a model on several ranks."""

    document: dict[str, Any]
    """The parts of the job's document that differ."""
    num_ranks: int = 2


def _compressed(name: str, **options: Any) -> Way:
    return Way({"sync": {"compression": {"name": name, **options}}})


def _divided(num_ranks: int = 2, **axes: Any) -> Way:
    return Way({"parallel": axes}, num_ranks)


WAYS = {
    "data": Way({}),
    "fp16 compression": _compressed("fp16"),
    "bf16 compression": _compressed("bf16"),
    "powersgd": _compressed("powersgd", start_step=2),
    "top-k": _compressed("topk", ratio=TOP_K_RATIO),
    "local SGD": Way({"sync": {"every": AGREE_EVERY}}),
    "DiLoCo": Way({"sync": {"every": AGREE_EVERY, "outer": {}}}),
    "shard, ZeRO 1": _divided(shard=2, zero=1),
    "shard, ZeRO 2": _divided(shard=2, zero=2),
    "shard, ZeRO 3": _divided(shard=2),
    "data x shard": _divided(4, data=2, shard=2),
    "tensor": _divided(tensor=2),
    "shard x tensor": _divided(4, shard=2, tensor=2),
    "pipeline, GPipe": _divided(pipeline=2, schedule="gpipe"),
    "pipeline, 1F1B": _divided(pipeline=2),
    "pipeline, interleaved": _divided(
        pipeline=2, schedule="interleaved", stages_per_rank=STAGES_PER_RANK
    ),
    "pipeline, zero bubble": _divided(
        pipeline=2, schedule="zero_bubble", stages_per_rank=STAGES_PER_RANK
    ),
    "context": _divided(context=2),
}


def document(way: str, source: Path, num_steps: int) -> JobSpec:
    train = {
        "epochs": NEVER,
        "max_steps": num_steps,
        "global_batch_size": BATCH_SIZE,
        "optimizer": ADAMW,
        "eval_every_epochs": NEVER,
    }
    if way.startswith("pipeline"):
        train["micro_batch_size"] = BATCH_SIZE // NUM_PIECES
    return JobSpec.model_validate(
        {
            "name": "strategies",
            "recipe": "language_model",
            "model": {"name": "gpt", **MODEL},
            "data": {"source": source.as_uri()},
            "train": train,
            "checkpoint": {"every_steps": 10**9},
            "resources": {"num_workers": WAYS[way].num_ranks},
            **WAYS[way].document,
        }
    )
