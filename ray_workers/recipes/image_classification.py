"""Recipe for classifying small images."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.datasets import Images, open_images
from ray_workers.datasets.core.alignment import images_like
from ray_workers.datasets.formats import folder_splits
from ray_workers.recipes import inference, measures, results, splits
from ray_workers.recipes.export import export
from ray_workers.recipes.image_inputs import ImageForm
from ray_workers.recipes.inference import chances_of, outputs_of
from ray_workers.recipes.models import images as networks
from ray_workers.recipes.models import imported
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import Rows, Samples


def build(document: spec.JobSpec, policy: DataPolicy, own: spec.Data | None = None) -> Workload:
    """Build the workload of a job. The same seed gives the same model and split on every rank. If
    `own` is given, the samples come from this data set instead of the document's data.

    Raises DataError.
    """
    seed, options = document.train.seed, document.model
    assert isinstance(options, networks.Options)
    images = open_images(document.data, policy)
    samples = images if own is None else images_like(images, open_images(own, policy))
    if samples.is_validation is not None:
        training, validation = splits.as_given(samples.is_validation)
    else:
        fraction = document.data.validation_fraction
        training, validation = splits.by_class(samples.labels, fraction, seed)
    shape = cast(networks.Shape, images.pixels.shape[1:])
    num_classes = len(images.classes)
    model = _network(options, shape, num_classes, seed)
    return Workload(
        model=model,
        train=_samples(samples, training),
        validation=_samples(samples, validation),
        loss_sum=measures.cross_entropy(document.train.label_smoothing),
        validation_loss_sum=measures.cross_entropy(0.0),
        metrics=lambda: measures.of_classes(num_classes, len(validation)),
        fingerprint=images.fingerprint,
        write_results=results.writer(document, inference.described(shape, images.classes)),
        about=folder_splits.lines(samples.num_left_out, samples.is_validation),
    )


def _network(
    options: networks.Options, shape: networks.Shape, num_classes: int, seed: int
) -> nn.Module:
    if isinstance(options, spec.Imported):
        return imported.build(options, seed, shape, (num_classes,), "(batch, classes)")
    with torch.device("meta"):
        return networks.build(options, shape, num_classes)


def _samples(images: Images, rows: Rows) -> Samples:
    def fetch(at: Rows) -> tuple[Tensor, Tensor]:
        return inference.scaled(images, at), torch.from_numpy(images.labels[at])

    return Samples(rows, fetch, images.labels[rows])


@dataclass(frozen=True)
class Classifier:
    """A trained model and the names of its classes. `ImageForm.tensor` describes its inputs."""

    model: nn.Module
    labels: Sequence[str]
    form: ImageForm

    def predict(self, images: Any) -> list[str]:
        """Return the most likely label of each image."""
        outputs = outputs_of(self.model, self.form.tensor(images))
        return [self.labels[i] for i in outputs.argmax(dim=1).tolist()]

    def predict_proba(self, images: Any) -> npt.NDArray[np.float64]:
        """Return (N, classes) probabilities, in the order of `labels`."""
        found: npt.NDArray[np.float64] = chances_of(self.model, self.form.tensor(images)).numpy()
        return found

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a `.onnx` or `.pt2` file that runs without dray; see `export.export`. The input of
        the exported model is `images`, float32 (N, channels, height, width) in 0..1."""
        example = torch.zeros(2, *self.form.shape)
        return export(self.model, "images", example, path, {"labels": list(self.labels)})


def load(folder: Path) -> Classifier:
    """Rebuild the classifier from the folder of a job's artifacts."""
    config = results.read_config(folder)
    document = spec.JobSpec.model_validate(config["spec"])
    assert isinstance(document.model, networks.Options)
    shape = cast(networks.Shape, tuple(config["input_shape"]))
    if isinstance(document.model, spec.Imported):
        model = imported.at_hand(document.model)
    else:
        model = networks.build(document.model, shape, config["num_classes"])
    form = ImageForm(shape, shape[1:], is_fixed=True)
    return Classifier(results.restore(model, folder), config["labels"], form)
