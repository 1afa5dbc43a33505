"""Loading a trained model. torch is imported only when it is needed."""

from __future__ import annotations

import os
from typing import Any

_NEEDED = frozenset({"numpy", "safetensors", "torch", "torchmetrics"})


def load(folder: str | os.PathLike[str], *, device: str = "cpu") -> Any:
    """Load a trained model from the folder of a job's artifacts, as downloaded by
    `Client.download`.

    Depending on the recipe, the model's `predict` accepts images as paths, Pillow images or arrays;
    rows as mappings or a DataFrame; or a string. `predict_proba` returns probabilities in the order
    of `labels`.

    Raises ImportError if the packages of `dray[predict]` are missing, and FileNotFoundError if the
    folder does not contain the result of a recipe.
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
