"""The sizes of a base model, derived from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from service.planning.model.unknown import Unknown

MAX_SIZE: Final = 1 << 40
MAX_LAYERS: Final = 4096


@dataclass(frozen=True)
class Architecture:
    """How the models of one `model_type` differ from others. Checked against transformers by
    tests."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of the fields that a config may lack. Without a default, a field is required."""
    qkv_bias: bool | None = None
    """Whether the projections of queries, keys and values have a bias; None if the field
    `attention_bias` decides it."""
    out_bias: bool | None = None
    """Whether the projection of the attention's output has a bias; None as in `qkv_bias`."""
    norms_queries: bool = False
    """Whether queries and keys are normalised."""
    has_norms_after: bool = False
    """Whether the outputs of attention and of the inner layers are normalised as well."""
    scales_embedding: bool = False
    has_own_head_dim: bool = False
    """Whether `head_dim` has a default of its own instead of the width divided by the heads."""


_NO_BIAS = {"tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False}
_GEMMA = {**_NO_BIAS, "tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4}
ARCHITECTURES: Final[Mapping[str, Architecture]] = MappingProxyType(
    {
        "llama": Architecture(_NO_BIAS),
        "mistral": Architecture(
            {**_NO_BIAS, "num_key_value_heads": 8}, qkv_bias=False, out_bias=False
        ),
        "qwen2": Architecture(
            {**_NO_BIAS, "num_key_value_heads": 32}, qkv_bias=True, out_bias=False
        ),
        "qwen3": Architecture(
            {**_NO_BIAS, "num_key_value_heads": 32, "head_dim": 128},
            norms_queries=True,
            has_own_head_dim=True,
        ),
        "gemma3_text": Architecture(
            _GEMMA,
            norms_queries=True,
            has_norms_after=True,
            scales_embedding=True,
            has_own_head_dim=True,
        ),
    }
)
"""The architectures that the planner knows, keyed by `model_type`."""


@dataclass(frozen=True)
class BaseShape:
    """Sizes of a causal language model. Linear layers are described by (inputs, outputs)."""

    kind: str
    vocabulary: int
    width: int
    inner: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool
    """Whether the output layer is the embedding."""
    qkv_bias: bool
    out_bias: bool
    inner_bias: bool
    norms_queries: bool
    has_norms_after: bool
    scales_embedding: bool
    window: int | None
    """Number of tokens that some layers see; None if every layer sees all earlier tokens."""
    num_rotations: int
    """Number of tables of rotary positions."""


def base_shape(config: Mapping[str, Any]) -> BaseShape:
    """Return the sizes in a `config.json`. Raises Unknown if the planner doesn't know the
    architecture, or if a size is missing or impossible."""
    kind = config.get("model_type")
    known = ARCHITECTURES.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise Unknown(
            f"the planner does not know the architecture {str(kind)[:100]!r} (model_type in the "
            f"base's config.json); it knows {', '.join(ARCHITECTURES)}"
        )
    of = {**known.defaults, **{name: one for name, one in config.items() if one is not None}}
    width, heads = _size(of, "hidden_size"), _size(of, "num_attention_heads")
    if config.get("num_key_value_heads", 0) is None:  # transformers then has one for each head
        of["num_key_value_heads"] = heads
    of.setdefault("num_key_value_heads", heads)
    if not known.has_own_head_dim:
        of.setdefault("head_dim", max(1, width // heads))
    has_bias = bool(of["attention_bias"])
    return BaseShape(
        kind=str(kind),
        vocabulary=_size(of, "vocab_size"),
        width=width,
        inner=_size(of, "intermediate_size"),
        num_layers=_size(of, "num_hidden_layers", MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=_size(of, "num_key_value_heads"),
        head_dim=_size(of, "head_dim"),
        is_tied=bool(of["tie_word_embeddings"]),
        qkv_bias=has_bias if known.qkv_bias is None else known.qkv_bias,
        out_bias=has_bias if known.out_bias is None else known.out_bias,
        inner_bias=bool(of["mlp_bias"]) and kind == "llama",
        norms_queries=known.norms_queries,
        has_norms_after=known.has_norms_after,
        scales_embedding=known.scales_embedding,
        window=_window(of, str(kind)),
        num_rotations=2 if kind == "gemma3_text" else 1,
    )


def _window(of: Mapping[str, Any], kind: str) -> int | None:
    """Return the window of layers with a sliding window, if the model has such layers."""
    if kind == "llama" or (kind.startswith("qwen") and not of.get("use_sliding_window")):
        return None
    given = of.get("sliding_window", 4096)
    return given if isinstance(given, int) and given > 0 else None


def _size(of: Mapping[str, Any], name: str, most: int = MAX_SIZE) -> int:
    found = of.get(name)
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= most:
        shown = "is missing" if found is None else f"is {str(found)[:100]}"
        raise Unknown(
            f"{name} in the base's config.json {shown}; it must be a number from 1 to {most:,}"
        )
    return found
