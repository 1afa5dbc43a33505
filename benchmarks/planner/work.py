"""The jobs whose memory is planned and measured: each axis, and each option that affects memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.equality.work import write_text

Job = tuple[int, dict[str, Any]]
"""(number of ranks, job document)"""

WIDE = {"width": 256, "context_length": 32, "num_layers": 3}
"""A model whose memory is mostly weights, whereas the default model's is mostly activations."""

INTERLEAVED = {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}
ZERO_BUBBLE = {"pipeline": 2, "schedule": "zero_bubble", "stages_per_rank": 2}
BF16_SENT = {"param_dtype": "bf16", "reduce_dtype": "bf16"}


SIDE = 48
"""Height and width of an image, in pixels."""


def draw(folder: Path, count: int = 40) -> Path:
    """Write colour images of noise, and masks of their bright pixels."""
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True)
    for number in range(count):
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        mask = (pixels.mean(axis=2) > 128).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number}.png")
    return folder


def jobs(folder: Path) -> dict[str, Job]:
    source, drawn = write_text(folder).as_uri(), draw(folder / "drawn").as_uri()

    def gpt(
        num_ranks: int = 1,
        parallel: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        **train: Any,
    ) -> Job:
        shape = {"num_layers": 4, "num_heads": 4, "width": 64, "context_length": 64}
        return num_ranks, {
            "recipe": "language_model",
            "model": {"name": "gpt", **shape, **(model or {})},
            "data": {"source": source},
            "train": {"global_batch_size": 16, "max_steps": 5, **train},
            "resources": {"num_workers": num_ranks},
            "parallel": parallel or {},
        }

    def wide(num_ranks: int = 1, parallel: dict[str, Any] | None = None, **train: Any) -> Job:
        return gpt(num_ranks, parallel, WIDE, **{"global_batch_size": 4, **train})

    def told(part: str, how: dict[str, Any], **train: Any) -> Job:
        num_ranks, document = wide(2, **train)
        return num_ranks, {**document, part: how}

    def image(
        model: dict[str, Any],
        num_ranks: int = 1,
        parallel: dict[str, Any] | None = None,
        **train: Any,
    ) -> Job:
        return num_ranks, {
            "recipe": "image_classification",
            "model": model,
            "data": {"source": "sklearn://digits"},
            "train": {"global_batch_size": 32, "max_steps": 5, **train},
            "resources": {"num_workers": num_ranks},
            "parallel": parallel or {},
        }

    def masks(num_ranks: int = 1, parallel: dict[str, Any] | None = None, **train: Any) -> Job:
        return num_ranks, {
            "recipe": "image_segmentation",
            "model": {"name": "unet", "width": 8, "depth": 3},
            "data": {"source": drawn, "image_size": [SIDE, SIDE], "classes": ["dark", "bright"]},
            "train": {"global_batch_size": 8, "max_steps": 5, **train},
            "resources": {"num_workers": num_ranks},
            "parallel": parallel or {},
        }

    def table(**train: Any) -> Job:
        return 1, {
            "recipe": "tabular_classification",
            "model": {"name": "mlp", "width": 512, "num_layers": 3},
            "data": {"source": "sklearn://breast_cancer"},
            "train": {"global_batch_size": 64, "max_steps": 5, **train},
        }

    resnet = {"name": "resnet", "depth": 8}
    momentum = {"name": "sgd", "lr": 0.01, "momentum": 0.9}
    found = {
        "gpt": gpt(),
        "gpt, bf16": gpt(precision="bf16"),
        "gpt, selective": gpt(recompute="selective"),
        "gpt, full": gpt(recompute="full"),
        "gpt, micro-batches": gpt(micro_batch_size=4),
        "gpt, dropout": gpt(model={"dropout": 0.1}),
        "wide gpt": wide(),
        "wide gpt, sgd with momentum": wide(optimizer=momentum),
        "wide gpt, bf16 state": wide(optimizer={"name": "adamw", "state_dtype": "bf16"}),
        "cnn": image({"name": "cnn"}),
        "mlp": image({"name": "mlp", "width": 128, "num_layers": 3}),
        "resnet": image(resnet),
        "resnet, bf16": image(resnet, precision="bf16"),
        "unet": masks(),
        "unet, bf16": masks(precision="bf16"),
        "unet, full": masks(recompute="full"),
        "unet, shard 2": masks(2, {"shard": 2}),
        "table": table(),
        "data 2": wide(2),
        # Not PowerSGD, because its hook ends in a gloo thread, which the tracker does not observe.
        "data 2, top-k": told("sync", {"compression": {"name": "topk"}}, optimizer=momentum),
        "data 2, local SGD": told("sync", {"every": 2}),
        "data 2, DiLoCo": told("sync", {"every": 2, "outer": {}}),
        "data 2, D-PSGD": told("sync", {"kind": "gossip"}),
        "data 2, exact": told("elastic", {"min_workers": 1, "exact": True}),
        "shard 2": wide(2, {"shard": 2}),
        "shard 2, ZeRO 2": wide(2, {"shard": 2, "zero": 2}),
        "shard 2, ZeRO 1": wide(2, {"shard": 2, "zero": 1}),
        "shard 2, ZeRO 1, lamb": wide(2, {"shard": 2, "zero": 1}, optimizer={"name": "lamb"}),
        "shard 2, ZeRO 1, one matrix": image(
            {"name": "mlp", "width": 2048, "num_layers": 2},
            *(2, {"shard": 2, "zero": 1}),
            optimizer={"name": "lamb"},
        ),
        "shard 2, full": wide(2, {"shard": 2}, recompute="full"),
        "shard 2, bf16": wide(2, {"shard": 2}, precision="bf16"),
        "shard 2, bf16 gathered": wide(2, {"shard": 2, **BF16_SENT}, precision="bf16"),
        "tensor 2": gpt(2, {"tensor": 2}),
        "context 2": gpt(2, {"context": 2}),
        "pipeline 2": gpt(2, {"pipeline": 2}),
        "resnet, pipeline 2": image(resnet, 2, {"pipeline": 2}),
        "pipeline 2, GPipe": gpt(2, {"pipeline": 2, "schedule": "gpipe"}, micro_batch_size=2),
        "pipeline 2, interleaved": gpt(2, INTERLEAVED, micro_batch_size=2),
        "pipeline 2, zero bubble": gpt(2, ZERO_BUBBLE, micro_batch_size=2),
        "data 2 x shard 2": wide(4, {"shard": 2}),
        "data 2 x tensor 2": wide(4, {"tensor": 2}),
        "shard 2 x tensor 2": gpt(4, {"shard": 2, "tensor": 2}),
        "tensor 2 x pipeline 2": gpt(4, {"tensor": 2, "pipeline": 2}),
    }
    # When the first copies are taken depends on the speed of the machine.
    off = {"checkpoint": {"in_memory": "off"}}
    return {name: (num_ranks, document | off) for name, (num_ranks, document) in found.items()}
