"""The address and the files of a base model, and checks without reading its weights."""

from __future__ import annotations

import re
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
SMALL_FILES: Final = (
    *(CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "chat_template.jinja"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt"),
    "tokenizer.model",
)
"""The files, except for the weights, that are looked for on a web server."""
FILES: Final = (*SMALL_FILES, SINGLE, INDEX)
"""The files that are looked for on a web server, which can't list a folder. The files that the
index names are added."""
PICKLED: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The names of pickled weights on a web server."""
HUB: Final = "https://huggingface.co"
OF_JOB: Final = r"^job://(job-[0-9a-z]{1,60})$"
OF_HUB: Final = r"^hf://[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*@[0-9a-f]{40}$"


def web_address(base: str) -> str:
    """Return the URL of the folder of a model on Hugging Face's hub; any other URL unchanged."""
    if not base.startswith("hf://"):
        return base
    name, _, revision = base.removeprefix("hf://").partition("@")
    return f"{HUB}/{name}/resolve/{revision}"


def job_of(base: str) -> str | None:
    """Return the id of the job whose result is the base; None for another base."""
    found = re.match(OF_JOB, base)
    return found[1] if found else None


def public_name(base: str) -> str:
    """Return the name of a model on Hugging Face's hub, such as `org/name`; any other URL
    unchanged."""
    return base.removeprefix("hf://").partition("@")[0] if re.match(OF_HUB, base) else base


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
