"""Loading a trained model. torch is imported only when it is needed."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from dray.input.model_names import SCHEME

_NEEDED = frozenset({"numpy", "safetensors", "torch", "torchmetrics"})


def load(folder: str | os.PathLike[str], *, device: str = "cpu") -> Any:
    """Load a trained model from the folder of a job's artifacts, as downloaded by
    `Client.download`; or from a version of a registered model, `model://NAME@VERSION` or
    `model://NAME@ALIAS`, whose files are downloaded from the server at DRAY_URL.

    Depending on the recipe, the model's `predict` accepts images as paths, Pillow images or arrays;
    rows as mappings or a DataFrame; or a string. `predict_proba` returns probabilities in the order
    of `labels`.

    Raises ImportError if the packages of `dray[predict]` are missing, and FileNotFoundError if the
    folder does not contain the result of a recipe. For registered models, also raises the
    exceptions of `Client.model_version`, and ValueError if the version is a checkpoint instead of a
    result.
    """
    if isinstance(folder, str) and folder.startswith(SCHEME):
        with tempfile.TemporaryDirectory(prefix="dray-model-") as scratch:
            _download(folder, scratch)
            return load(scratch, device=device)
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


def _download(reference: str, folder: str) -> None:
    from dray.client import Client

    with Client() as client:
        version = client.model_version(reference)
        if version.step is not None:
            raise ValueError(
                f"{version.reference} is a checkpoint, and only the result of a job can be loaded: "
                f"register the result of {version.job_id} without a step"
            )
        client.download(version.job_id, folder)
