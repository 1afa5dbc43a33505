"""The files of a fine-tuned model, chosen from a job's result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

ModelFormat = Literal["safetensors", "adapter"]
_ADAPTER = "adapter/"
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def exported(paths: Iterable[str], form: ModelFormat) -> Mapping[str, str]:
    """Return the files of a format, each with its path in the exported folder.

    safetensors: the complete model with its tokenizer, as transformers loads it. adapter: the
    adapter as peft loads it. Raises ValueError if the result doesn't have the format.
    """
    found = list(paths)
    if form == "adapter":
        chosen = {path: path.removeprefix(_ADAPTER) for path in found if path.startswith(_ADAPTER)}
        if not chosen:
            raise ValueError(
                "the result has no adapter, because all weights were trained: use the format "
                "safetensors"
            )
        return chosen
    if not set(_WEIGHTS).intersection(found):
        raise ValueError(
            "the result has only an adapter, because model.adapter.merge is false: use the format "
            "adapter"
            if any(path.startswith(_ADAPTER) for path in found)
            else "the result has no model.safetensors: only results of recipes can be exported"
        )
    return {path: path for path in found if "/" not in path}
