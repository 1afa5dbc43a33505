"""Loading a trained model, which imports torch only when it is called."""

from __future__ import annotations

import os
from typing import Any

_NEEDED = frozenset({"numpy", "safetensors", "torch", "torchmetrics"})


def load(folder: str | os.PathLike[str], *, device: str = "cpu") -> Any:
    """Load the trained model from the folder of a job's artifacts, as written by `Client.download`.

    The model's `predict` accepts images as paths, Pillow images or arrays; rows as mappings or a
    frame; or a text. `predict_proba` returns probabilities in the order of `labels`.

    Raises ImportError if the packages of `dray[predict]` are missing, and FileNotFoundError if the
    folder has no result of a recipe.
    """
    try:
        from ray_workers.recipes import load as load_result
    except ModuleNotFoundError as error:
        if error.name not in _NEEDED:
            raise
        raise ImportError(
            f"dray.load needs the package {error.name}: pip install 'dray[predict]'",
            name=error.name,
        ) from error
    return load_result(folder, device=device)
