"""A base for plans of fine-tuning, and documents with the change that a plan names."""

from __future__ import annotations

import functools
import operator
from typing import Any

import yaml

from dray.spec import JobSpec

LARGE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


def changed(spec: JobSpec, change: str) -> JobSpec:
    """Return the document with a change such as `train.recompute full with parallel.shard 2`."""
    whole = spec.model_dump(mode="json")
    for each in change.split(" with "):
        path, value = each.split(" ")
        *outer, field = path.split(".")
        functools.reduce(operator.getitem, outer, whole)[field] = yaml.safe_load(value)
    return JobSpec.model_validate(whole)
