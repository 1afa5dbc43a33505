"""Checks of the files of a base model, without reading its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
TOKENIZER: Final = "tokenizer.json"
POSITIONS: Final = ("max_position_embeddings", "n_positions")
"""Fields of `config.json` with the number of positions; GPT-2 has the second one."""
MAX_SHOWN: Final = 100
"""Maximum number of characters of a file's content in an error."""
PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt")
"""Suffixes of files with pickled weights, which can run code when they are read."""


def fault_of_names(names: Collection[str]) -> str | None:
    """Return what is missing from a folder with these files, as the predicate of a sentence whose
    subject is the folder."""
    if CONFIG not in names:
        return f"has no {CONFIG}: give the folder of a model in the format of transformers"
    if SINGLE not in names and INDEX not in names:
        if any(name.endswith(PICKLES) for name in names):
            return (
                "has only pickled weights, which can run code when they are read: save the "
                "model as safetensors, for example with save_pretrained of transformers"
            )
        return f"has no weights: it contains neither {SINGLE} nor {INDEX}"
    if TOKENIZER not in names:
        return f"has no tokenizer: {TOKENIZER} is missing"
    return None


def fault_of_config(config: Any, max_length: int) -> str | None:
    """Return why the model with this `config.json` can't be fine-tuned, as the predicate of a
    sentence whose subject is the file."""
    if not isinstance(config, Mapping):
        return "is not a JSON object"
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes or not isinstance(classes[0], str):
        return "names no architecture: the field `architectures` is missing"
    if not classes[0].endswith(("ForCausalLM", "LMHeadModel")):
        kind = classes[0][:MAX_SHOWN]
        return f"belongs to a {kind}, but only causal language models (ForCausalLM) are supported"
    if config.get("quantization_config") is not None:
        return "belongs to a quantized model: give the model with its original weights"
    for name in POSITIONS:
        longest = config.get(name)
        if isinstance(longest, int) and max_length > longest:
            return (
                f"allows {longest:,} positions ({name}), but method.max_length is "
                f"{max_length:,}: set it to {longest:,} or less"
            )
    return None
