"""Computes which published models fit which GPUs, for docs/guides/fine-tuning.md.

`python -m tests.unit.service.planning.fitting_table` prints the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dray.spec import JobSpec
from service.planning.model.base_model import TokenRows, record
from service.planning.model.base_shapes import base_shape
from service.planning.model.choice import GIB, MEMORY_GIB, OVERHEAD_BYTES, plan_of
from service.planning.model.cost import GPU
from service.planning.model.memory import elements_of
from service.planning.model.shapes import shapes_of

KINDS = ("L4", "A100-40G", "H100", "H200")
SIZES = (1, 2, 4, 8, 16, 32, 64)
LENGTH = 2048
FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"),
)
MODELS: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    "Llama 3.1 8B": ("llama", (128256, 4096, 14336, 32, 32, 8, 128, False)),
    "Llama 3.1 70B": ("llama", (128256, 8192, 28672, 80, 64, 8, 128, False)),
    "Qwen3 0.6B": ("qwen3", (151936, 1024, 3072, 28, 16, 8, 128, True)),
    "Qwen3 1.7B": ("qwen3", (151936, 2048, 6144, 28, 16, 8, 128, True)),
    "Qwen3 4B": ("qwen3", (151936, 2560, 9728, 36, 32, 8, 128, True)),
    "Qwen3 8B": ("qwen3", (151936, 4096, 12288, 36, 32, 8, 128, False)),
    "Qwen3 14B": ("qwen3", (151936, 5120, 17408, 40, 40, 8, 128, False)),
    "Qwen3 32B": ("qwen3", (151936, 5120, 25600, 64, 64, 8, 128, False)),
    "Gemma 3 1B": ("gemma3_text", (262144, 1152, 6912, 26, 4, 1, 256, True)),
    "Gemma 3 4B": ("gemma3_text", (262208, 2560, 10240, 34, 8, 4, 256, True)),
    "Gemma 3 12B": ("gemma3_text", (262208, 3840, 15360, 48, 16, 8, 256, True)),
    "Gemma 3 27B": ("gemma3_text", (262208, 5376, 21504, 62, 32, 16, 128, True)),
}
"""`model_type`, and the values of FIELDS in the published `config.json` (for the larger models of
Gemma 3, in its `text_config`)."""


def config_of(name: str) -> dict[str, Any]:
    kind, values = MODELS[name]
    return {"model_type": kind, **dict(zip(FIELDS, values, strict=True))}


def num_weights(name: str) -> int:
    trace = record(
        base_shape(config_of(name)), None, TokenRows(1, 1, is_joined=False), half=True, on_gpu=True
    )
    return int(elements_of(trace))


def fewest(name: str, adapter: str, kind: str) -> int | None:
    """Return the fewest GPUs of a kind with which the model can be fine-tuned."""
    available = min(MEMORY_GIB[kind]) * GIB - OVERHEAD_BYTES
    for size in SIZES:
        spec = JobSpec.model_validate(
            {
                "recipe": "fine_tuning",
                "model": {"base": "file:///base", "adapter": adapter},
                "method": {"max_length": LENGTH},
                "data": {"source": "file:///examples.jsonl"},
                "train": {"global_batch_size": size, "precision": "bf16", "recompute": "full"},
                "resources": {"num_workers": size, "gpus_per_worker": 1},
                "parallel": {"shard": size, "param_dtype": "bf16"} if size > 1 else {},
            }
        )
        shapes = shapes_of(spec, config=config_of(name))
        if plan_of(spec, shapes, GPU, available, all_of_them=False).chosen is not None:
            return size
    return None


def table() -> str:
    adapters = {"lora": "LoRA", "none": "all weights"}
    heads = [f"{kind}, {shown}" for shown in adapters.values() for kind in KINDS]
    lines = [f"| model | weights | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for name in MODELS:
        found = [fewest(name, adapter, kind) for adapter in adapters for kind in KINDS]
        cells = " | ".join("-" if one is None else str(one) for one in found)
        lines.append(f"| {name} | {num_weights(name) / 1e9:.1f} billion | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
