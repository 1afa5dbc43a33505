"""Ready-made jobs: a model, its data and its metrics, configured and never coded.

import dray

model = dray.load("folder-of-a-job's-artifacts")
model.predict(...)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dray.spec import Data, JobSpec
from ray_workers.recipes import (
    image_classification,
    image_segmentation,
    language_model,
    private_data,
    results,
    tabular,
)
from ray_workers.recipes.private_data import PrivateData
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.workload import Workload


class BuildWorkload(Protocol):
    """Builds a workload."""

    def __call__(self, document: JobSpec, policy: DataPolicy, own: Data | None = None) -> Workload:
        """Model and data on the CPU, the same on every rank. Raises DataError. own: the samples are
        these, and the document's data only say what the model is."""


@dataclass(frozen=True)
class Recipe:
    build: BuildWorkload
    load: Callable[[Path], Any]
    """The result's folder -> an object with `predict`."""
    private_data: Callable[[Any, JobSpec, Path], PrivateData] | None = None
    """(such an object, document, path) -> the data of a client outside of the cluster. None where
    there are no such clients."""


RECIPES: Mapping[str, Recipe] = {
    "image_classification": Recipe(
        image_classification.build, image_classification.load, private_data.of_images
    ),
    "image_segmentation": Recipe(image_segmentation.build, image_segmentation.load),
    "tabular_classification": Recipe(
        tabular.build_classification, tabular.load, private_data.of_table
    ),
    "tabular_regression": Recipe(tabular.build_regression, tabular.load, private_data.of_table),
    "language_model": Recipe(language_model.build, language_model.load),
}
"""The recipes by name, as a job document's `recipe` has it."""


def load(folder: str | os.PathLike[str], *, device: str = "cpu") -> Any:
    """The trained model in the folder of a job's artifacts: an `image_classification.Classifier`,
    `image_segmentation.Segmenter`, `tabular.Predictor` or `language_model.Generator`, each with a
    `predict` that says what it takes. Raises FileNotFoundError if the folder holds no result."""
    path = Path(folder)
    recipe = results.read_config(path)["recipe"]
    loaded = RECIPES[recipe].load(path)
    loaded.model.to(device)
    return loaded
