"""A recipe's result files: the weights, and everything that is needed to rebuild the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dray.spec import JobSpec
from ray_workers.training.core.workload import StoredWeights, Trained, WriteResults

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""Names the file of each tensor, in the format of Hugging Face's libraries, if the weights are in
several files."""
CONFIG = "config.json"
DRAY_CONFIG = "dray.json"
"""Contains what is otherwise in `CONFIG`, if `CONFIG` is the configuration of a Hugging Face
model."""
METADATA = {"format": "pt"}
"""The metadata with which transformers accepts a safetensors file."""


def writer(document: JobSpec, config: Mapping[str, Any]) -> WriteResults:
    """Return a function that writes the weights, the metrics, the labels, and a `config.json` that
    includes `config`."""

    def write(trained: Trained, metrics: Mapping[str, float], step: int, folder: Path) -> None:
        write_weights(trained, folder)
        write_about(document, config, metrics, step, folder)

    return write


def write_weights(
    trained: Trained, folder: Path, dtypes: Mapping[str, torch.dtype] = MappingProxyType({})
) -> None:
    """Write the weights or, if they are already stored in several files, the index of the files.
    dtypes: the data types of tensors that are stored with a different type than in the model."""
    if isinstance(trained, StoredWeights):
        if set(trained.file_of.values()) != {WEIGHTS}:
            write_index(trained, folder)
        return
    state = trained.state_dict() if isinstance(trained, nn.Module) else trained
    kept = {
        key: value.to("cpu", dtypes.get(key, value.dtype)).contiguous()
        for key, value in state.items()
    }
    save_file(_apart(kept), folder / WEIGHTS, METADATA)


def write_index(stored: StoredWeights, folder: Path) -> None:
    size = {"total_size": stored.num_bytes}
    _write_json(folder / INDEX, {"metadata": size, "weight_map": dict(stored.file_of)})


def write_about(
    document: JobSpec,
    config: Mapping[str, Any],
    metrics: Mapping[str, float],
    step: int,
    folder: Path,
    name: str = CONFIG,
) -> None:
    """Write the files with the document, the labels and the metrics. name: the file with the
    document and `config`."""
    assert document.model is not None
    about = {"recipe": document.recipe, "model": document.model.model_dump(mode="json")}
    whole = {**about, **config, "step": step, "spec": document.model_dump(mode="json")}
    _write_json(folder / name, whole)
    if "labels" in config:
        _write_json(folder / "labels.json", config["labels"])
    # A metric that is undefined for the validation samples is NaN, which JSON does not support.
    finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    _write_json(folder / "metrics.json", {"step": step, **finite})


def _apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, copied if necessary so that they share no memory, as the file format
    requires. Tied weights of a model share memory."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        address = value.untyped_storage().data_ptr()
        found[key] = value.clone() if address in seen else value
        seen.add(address)
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration. Raises FileNotFoundError if the folder has no result."""
    path = folder / DRAY_CONFIG
    if not path.is_file():
        path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} does not contain a recipe's result: {CONFIG} is missing. Download a "
            "result with "
            "`dray download JOB FOLDER`"
        )
    config: dict[str, Any] = json.loads(path.read_text())
    return config


def restore(model: nn.Module, folder: Path) -> nn.Module:
    """Load the folder's weights into the model, and return it in evaluation mode."""
    model.load_state_dict(read_weights(folder))
    return model.eval()


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the tensors from the file or files of a result. Raises FileNotFoundError if a file is
    missing, and ValueError if the index is damaged."""
    index = folder / INDEX
    if (folder / WEIGHTS).exists() or not index.exists():
        return load_file(folder / WEIGHTS)
    try:
        file_of: dict[str, str] = json.loads(index.read_text())["weight_map"]
        names = sorted(set(file_of.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file is not in the same folder")
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} does not contain all weights: {missing[0]} is missing. Download the "
            "complete result with `dray download JOB FOLDER`"
        )
    found = {key: value for name in names for key, value in load_file(folder / name).items()}
    if found.keys() != file_of.keys():
        (wrong, *_) = sorted(found.keys() ^ file_of.keys())
        raise ValueError(f"{index} and its files do not contain the same tensors: {wrong}")
    return found


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
