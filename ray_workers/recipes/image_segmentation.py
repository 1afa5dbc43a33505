"""Recipe for classifying every pixel of an image."""

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
from ray_workers.datasets import MaskedImages, open_masked_images
from ray_workers.datasets.core.alignment import masked_images_like
from ray_workers.datasets.formats import folder_splits
from ray_workers.recipes import inference, measures, results, splits
from ray_workers.recipes.export import export
from ray_workers.recipes.image_inputs import ImageForm
from ray_workers.recipes.inference import chances_of, outputs_of
from ray_workers.recipes.models import imported
from ray_workers.recipes.models.images import Shape
from ray_workers.recipes.models.unet import Unet
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.workload import Workload
from ray_workers.training.data.device_dataset import Rows, Samples


def build(document: spec.JobSpec, policy: DataPolicy, own: spec.Data | None = None) -> Workload:
    """Build the workload of a job. The same seed gives the same model and split on every rank. If
    `own` is given, the samples come from this data set instead of the document's data.

    Raises DataError.
    """
    seed, options = document.train.seed, document.model
    assert isinstance(options, spec.Unet | spec.Imported)
    images = open_masked_images(document.data, policy)
    samples = images
    if own is not None:
        samples = masked_images_like(images, open_masked_images(own, policy))
    if samples.is_validation is not None:
        training, validation = splits.as_given(samples.is_validation)
    else:
        fraction = document.data.validation_fraction
        training, validation = splits.at_random(len(samples.masks), fraction, seed)
    shape = cast(Shape, images.pixels.shape[1:])
    num_classes = len(images.classes)
    if isinstance(options, spec.Imported):
        outputs = (num_classes, *shape[1:])
        form = "(batch, classes, height, width)"
        model = imported.build(options, seed, shape, outputs, form)
    else:
        with torch.device("meta"):
            model = Unet(options, shape, num_classes)
    return Workload(
        model=model,
        train=_samples(samples, training),
        validation=_samples(samples, validation),
        loss_sum=measures.cross_entropy_and_dice,
        validation_loss_sum=measures.cross_entropy_and_dice,
        metrics=lambda: measures.of_pixels(num_classes),
        fingerprint=images.fingerprint,
        write_results=results.writer(document, inference.described(shape, images.classes)),
        about=folder_splits.lines(samples.num_left_out, samples.is_validation),
    )


def _samples(images: MaskedImages, rows: Rows) -> Samples:
    def fetch(at: Rows) -> tuple[Tensor, Tensor]:
        masks = torch.from_numpy(np.take(images.masks, at, axis=0)).to(torch.int64)
        return inference.scaled(images, at), masks

    return Samples(rows, fetch)


@dataclass(frozen=True)
class Segmenter:
    """A trained model and the names of its classes. `ImageForm.tensor` describes its inputs, which
    can have any size. Files and Pillow images are scaled if the training images were scaled."""

    model: nn.Module
    labels: Sequence[str]
    """Names of the classes, in the order of the class numbers in masks. The first class is the
    background."""
    form: ImageForm

    def predict(self, images: Any) -> Tensor:
        """Return the most likely class of each pixel: uint8 (N, height, width), indices into
        `labels`."""
        return outputs_of(self.model, self.form.tensor(images)).argmax(dim=1).to(torch.uint8)

    def predict_proba(self, images: Any) -> npt.NDArray[np.float64]:
        """Return (N, classes, height, width) probabilities, in the order of `labels`."""
        found: npt.NDArray[np.float64] = chances_of(self.model, self.form.tensor(images)).numpy()
        return found

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write a `.onnx` or `.pt2` file that runs without dray; see `export.export`. The input of
        the exported model is `images`, float32 (N, channels, height, width) in 0..1, with the size
        of the training images."""
        example = torch.zeros(2, *self.form.shape)
        return export(self.model, "images", example, path, {"labels": list(self.labels)})


def load(folder: Path) -> Segmenter:
    """Rebuild the model from the folder of a job's artifacts."""
    config = results.read_config(folder)
    document = spec.JobSpec.model_validate(config["spec"])
    assert isinstance(document.model, spec.Unet | spec.Imported)
    shape = cast(Shape, tuple(config["input_shape"]))
    if isinstance(document.model, spec.Imported):
        model = imported.at_hand(document.model)
    else:
        model = Unet(document.model, shape, config["num_classes"])
    form = ImageForm(shape, document.data.image_size, is_fixed=False)
    return Segmenter(results.restore(model, folder), config["labels"], form)
