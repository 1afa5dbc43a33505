"""All calls of transformers and peft that create a model or a tokenizer, and their private names.

The packages are imported when they are used, because importing them takes seconds. Tested with
transformers 5.24 and peft 0.21.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.datasets.core.errors import broken, reading, shortened
from ray_workers.datasets.formats.base_models import BaseModel
from ray_workers.training.core.errors import ModelError

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
SCORES = "score.weight"
"""The last layer of models with a single output, a linear layer: (1, width)."""
ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""The types of layers in which a mask separates the examples of a row."""
APART = frozenset({"gemma3_text", "gpt2", "llama", "mistral", "qwen2", "qwen3"})
"""Architectures (model_type) whose attention can compute each sequence of a row by itself."""
NOT_SEPARATED = frozenset(
    {
        *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "flaubert"),
        *("megatron-bert", "openai-gpt", "rembert", "roberta", "roberta-prelayernorm"),
        *("roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    }
)
"""Architectures (model_type) that take positions, but whose mask does not depend on them. Most are
encoders, in which tokens also see the tokens after them."""


def load_tokenizer(folder: Path, location: str) -> Any:
    """Load the tokenizer from a folder with the files of the base model. Raises DataError."""
    from transformers import AutoTokenizer

    with reading(location, "has a tokenizer that can't be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    if not tokenizer.is_fast:
        raise broken(location, "has a tokenizer without a fast version (tokenizer.json)")
    return tokenizer


def empty_model(base: BaseModel, folder: Path, *, scores: bool = False) -> Any:
    """Create the model, with its parameters on the meta device and its buffers on the CPU. folder:
    contains `config.json`. scores: whether the last layer is `SCORES`. Raises DataError if the
    architecture can't be used."""
    from accelerate import init_empty_weights
    from transformers import (
        CONFIG_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    location = f"{base.location}/config.json"
    kind = base.config.get("model_type")
    if kind not in CONFIG_MAPPING:
        if "auto_map" in base.config:
            raise broken(
                location,
                "belongs to a model with its own Python code (auto_map), which dray does not run",
            )
        raise broken(
            location,
            f"belongs to a model of the architecture {shortened(kind)} (model_type), which this "
            "version of transformers does not have",
        )
    with reading(location, "belongs to a model that can't be created"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        # The base could name flash attention, which would mix the examples of a row, or the
        # address of a kernel with its own code.
        config._attn_implementation = None
        config.num_labels = 1
        if scores and type(config) not in AutoModelForSequenceClassification._model_mapping:
            raise broken(
                location,
                f"has the architecture {shortened(kind)} (model_type), for which transformers has "
                "no class for reward models (ForSequenceClassification)",
            )
        kinds = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        with init_empty_weights(include_buffers=False):
            create: Any = kinds.from_config
            model = create(config, dtype=torch.get_default_dtype(), trust_remote_code=False)
        model.tie_weights()  # the context has created each parameter anew
    return model


def refuse_unfit_layers(lm: Any, location: str, *, packs: bool) -> None:
    """Raise DataError if the model does not accept or does not use positions, or if it has layers
    in which tokens would be affected by other examples in their row. packs: whether a row can have
    several examples."""
    kind = type(lm).__name__
    if "position_ids" not in inspect.signature(lm.forward).parameters:
        raise broken(
            location,
            f"belongs to a {kind}, which has no input for positions and is not supported yet",
        )
    if lm.config.model_type in NOT_SEPARATED:
        raise broken(
            location,
            f"belongs to a {kind}, whose attention does not depend on the positions, and which is "
            "not supported",
        )
    layers = set(getattr(lm.config, "layer_types", None) or ())
    if packs and (lm._is_stateful or layers - ATTENTION):
        raise broken(
            location,
            f"belongs to a {kind}, which also has layers other than attention. These layers would "
            "mix the examples in a row: set method.packing to false",
        )


def attend_apart(lm: Any) -> bool:
    """Make the attention layers compute each sequence of a row by itself, without a mask, if the
    architecture is known to allow it. The model then needs the argument `sequence_lengths`, the
    lengths of the sequences in the only row. Returns whether it does."""
    from transformers import AttentionInterface

    config = lm.config
    if (
        config.model_type not in APART
        or config._attn_implementation != "sdpa"
        or getattr(config, "use_bidirectional_attention", False)
    ):
        return False
    AttentionInterface.register("dray_apart", _attend_apart)
    config._attn_implementation = "dray_apart"  # for which transformers creates no masks
    return True


def _attend_apart(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    sequence_lengths: Sequence[int],
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention within each sequence of a row: (1, heads, T, width) query, key and value -> (1, T,
    heads, width)."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found = []
    parts = (torch.split(one, list(sequence_lengths), dim=2) for one in (query, key, value))
    for length, q, k, v in zip(sequence_lengths, *parts, strict=True):
        mask = None  # each token sees itself and all tokens before it
        if sliding_window is not None and length > sliding_window:
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = seen.tril().triu(1 - sliding_window)[None, None]
        out, _ = sdpa_attention_forward(module, q, k, v, mask, **options)
        found.append(out)
    return torch.cat(found, dim=1), None


def add_adapter(lm: nn.Module, adapter: spec.Lora) -> None:
    """Add adapters to the model in place, and freeze all other parameters. Raises ModelError."""
    from peft import inject_adapter_in_model

    config = lora_config(adapter, None)
    score = SCORES.removesuffix(".weight")
    if hasattr(lm, score):
        config.exclude_modules = [score]
    try:
        inject_adapter_in_model(config, lm, low_cpu_mem_usage=True)
    except ValueError as error:
        raise ModelError(f"model.adapter does not fit the base: {error}") from error


def lora_config(adapter: spec.Lora, base: str | None, *, scores: bool = False) -> Any:
    """Return peft's configuration. base: the location of the base model. scores: whether the last
    layer is `SCORES`, which is trained and stored with the adapter."""
    from peft import LoraConfig

    made: Any = LoraConfig
    return made(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=adapter.target_modules,
        use_rslora=adapter.rslora,
        use_dora=adapter.kind == "dora",
        base_model_name_or_path=base,
        **(
            {"task_type": "SEQ_CLS", "modules_to_save": [SCORES.removesuffix(".weight")]}
            if scores
            else {"task_type": "CAUSAL_LM"}
        ),
    )


@contextmanager
def adapters_off(lm: nn.Module) -> Iterator[None]:
    """Context manager in which the model returns the outputs of its base. peft's own function would
    also change which parameters are trained."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in lm.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def train_only_adapters(lm: nn.Module, mode: bool) -> None:
    """Switch the base to evaluation, and its adapters to training if `mode` is set, so that only
    the dropout of the adapters is active."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    lm.eval()
    for layer in lm.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.training = mode
            dropout: Any = layer.lora_dropout
            dropout.train(mode)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a linear layer stores its weight as (inputs, outputs), as in GPT-2."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(layer, Conv1D)


def renaming(lm: Any, location: str) -> Callable[[str], str]:
    """Return a function that maps a tensor's name in a weights file to the parameter's name in the
    model. Raises DataError if the files split the weights into different tensors than the model
    does."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    mapping: Any = get_model_conversion_mapping(lm)
    renames = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if not isinstance(one, WeightRenaming)]
    names = dict(lm.named_parameters(remove_duplicate=False))

    def rename(key: str) -> str:
        name, converter = rename_source_key(key, renames, converters, lm.base_model_prefix, names)
        if converter is not None:
            kind = type(lm).__name__
            raise broken(
                location,
                f"is a {kind}, whose weights have one form in files and another form in memory; "
                "such architectures are not supported yet",
            )
        return name

    return rename


def dtype_of(rows: Any, location: str) -> torch.dtype:
    """Return the type of a stored tensor. Raises DataError if the type is not a floating-point
    type."""
    found = TORCH_DTYPES.get(rows.get_dtype())
    if found is None:
        raise broken(
            location,
            f"is stored as {rows.get_dtype()}; the supported types are {', '.join(TORCH_DTYPES)}",
        )
    return found
