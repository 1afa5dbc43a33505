"""MLflow's description of a recipe's model: the file `MLmodel` with the model's signature."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

CONFIGS, MLMODEL = ("dray.json", "config.json"), "MLmodel"
"""CONFIGS: the files that can describe a recipe's result; the first one that exists does."""
LOADER = "dray.mlflow_model"

_Fields = list[dict[str, Any]]


def mlmodel(config: Mapping[str, Any], run_id: str) -> str:
    """Return the content of the file `MLmodel`, created from the description of the
    result. The content is JSON, which is valid YAML."""
    inputs, outputs = _signature(config)
    described = {
        "artifact_path": "",
        "run_id": run_id,
        "flavors": {"python_function": {"loader_module": LOADER}},
        "signature": {
            "inputs": json.dumps(inputs),
            "outputs": json.dumps(outputs),
            "params": None,
        },
    }
    return json.dumps(described, indent=1) + "\n"


def _signature(config: Mapping[str, Any]) -> tuple[_Fields, _Fields]:
    """Return the model's inputs and outputs. A size of -1 means any size."""
    match config["recipe"]:
        case "image_classification":
            return [_tensor("float32", -1, *config["input_shape"])], [_tensor("str", -1)]
        case "image_segmentation":
            channels = config["input_shape"][0]
            return [_tensor("float32", -1, channels, -1, -1)], [_tensor("uint8", -1, -1, -1)]
        case "language_model" | "fine_tuning":
            method = config.get("spec", {}).get("method") or {}
            is_reward = method.get("name") == "reward"
            return [_column("string", "prompt")], [_column("double" if is_reward else "string")]
        case _:
            columns = [
                *(_column("double", name) for name in config["numeric"]),
                *(_column("string", name) for name in config["dates"]),
                *(_column("string", one["name"]) for one in config["categorical"]),
            ]
            return columns, [_column("string" if "labels" in config else "double")]


def _tensor(dtype: str, *shape: int) -> dict[str, Any]:
    return {"type": "tensor", "tensor-spec": {"dtype": dtype, "shape": list(shape)}}


def _column(kind: str, name: str | None = None) -> dict[str, Any]:
    named = {} if name is None else {"name": name}
    return {"type": kind, "required": True, **named}
