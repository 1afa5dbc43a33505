"""Ready-made jobs: a model, its data and its metrics, configured without writing code.

import dray

model = dray.load("folder-of-a-job's-artifacts")
model.predict(...)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from dray.client_errors import SpecError
from dray.spec import Data, JobSpec
from dray.train.storage_faults import StorageError
from ray_workers.recipes import (
    fine_tuning,
    image_classification,
    image_segmentation,
    language_model,
    private_data,
    results,
    tabular,
)
from ray_workers.recipes.private_data import PrivateData
from ray_workers.shared.names import upload_name
from ray_workers.shared.node_needs import DataPolicy, ResultFile
from ray_workers.training.core.errors import DataError, ModelError, SourceUnavailableError
from ray_workers.training.core.workload import Workload


class BuildWorkload(Protocol):
    """A function that builds a workload."""

    def __call__(self, document: JobSpec, policy: DataPolicy, own: Data | None = None) -> Workload:
        """Build the model and the data on the CPU, identically on every rank. If `own` is given,
        the samples come from this data set, and the document's data determine only the model. Raise
        DataError."""


@dataclass(frozen=True)
class Recipe:
    build: BuildWorkload
    load: Callable[[Path], Any]
    """Loads a result's folder, and returns an object with a `predict` method."""
    private_data: Callable[[Any, JobSpec, Path], PrivateData] | None = None
    """Returns the data of a client outside of the cluster, given the loaded object, the document
    and a path. None if the recipe does not support such clients."""


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
    "fine_tuning": Recipe(fine_tuning.build, fine_tuning.load),
}
"""The recipes, keyed by their name in a job document."""


def load(folder: str | os.PathLike[str], *, device: str = "cpu") -> Any:
    """Load the trained model from the folder of a job's artifacts: an
    `image_classification.Classifier`, `image_segmentation.Segmenter`, `tabular.Predictor`,
    `language_model.Generator` or `fine_tuning.Writer`. The docstring of its `predict` method
    describes the inputs. Raise FileNotFoundError if the folder has no result."""
    path = Path(folder)
    recipe = results.read_config(path)["recipe"]
    loaded = RECIPES[recipe].load(path)
    loaded.model.to(device)
    return loaded


def upload_path(folder: Path, file_id: str) -> Path:
    """Return where `preview` looks for an uploaded file."""
    return folder / upload_name(file_id)


def preview(
    document: JobSpec, uploads: Path, result: Sequence[tuple[str, str, int, str]]
) -> tuple[dict[str, Any], list[str]]:
    """Return `examples.json` of a job of fine-tuning, and its lines in the job's log. This machine
    reads all sources that the user may read, without credentials. Raises SpecError.

    uploads: folder with the uploaded files that the document names. result: name, URL, bytes and
    SHA-256 of each file of the job whose result is the base; files with weights need not exist.
    """
    files = tuple(ResultFile(*one) for one in result)
    policy = replace(DataPolicy.open(), uploads_url=uploads.as_uri(), result=files)
    try:
        return fine_tuning.preview(document, policy)
    except (DataError, ModelError, SourceUnavailableError, StorageError) as error:
        raise SpecError(str(error)) from error
