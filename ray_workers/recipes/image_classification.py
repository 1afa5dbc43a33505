"""Recipe: classify small images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.contracts import DataPolicy
from ray_workers.recipes import measures, pixels, results, splits
from ray_workers.recipes.models import images as networks
from ray_workers.training.datasets import Images, open_images
from ray_workers.training.samples import Rows, Samples
from ray_workers.training.workload import Workload


def build(document: spec.JobSpec, policy: DataPolicy) -> Workload:
    """The workload of a job: the same model and split for the same seed, on every rank.

    Raises DataError.
    """
    seed, options = document.train.seed, document.model
    assert isinstance(options, spec.Cnn | spec.ResNet | spec.Mlp)
    images = open_images(document.data, policy)
    training, validation = splits.by_class(images.labels, document.data.validation_fraction, seed)
    shape = cast(networks.Shape, images.pixels.shape[1:])
    num_classes = len(images.classes)
    with torch.device("meta"):
        model = networks.build(options, shape, num_classes)
    return Workload(
        model=model,
        train=_samples(images, training),
        validation=_samples(images, validation),
        loss_sum=measures.cross_entropy(document.train.label_smoothing),
        validation_loss_sum=measures.cross_entropy(0.0),
        metrics=lambda: measures.of_classes(num_classes, len(validation)),
        fingerprint=images.fingerprint,
        write_results=results.writer(document, pixels.described(shape, images.classes)),
    )


def _samples(images: Images, rows: Rows) -> Samples:
    def fetch(at: Rows) -> tuple[Tensor, Tensor]:
        return pixels.scaled(images, at), torch.from_numpy(images.labels[at])

    return Samples(rows, fetch)


@dataclass(frozen=True)
class Classifier:
    """A trained model with the names of its classes."""

    model: nn.Module
    labels: Sequence[str]

    def predict(self, images: Tensor) -> list[str]:
        """The likeliest label of each image: float (N, channels, height, width), in 0..1."""
        with torch.no_grad():
            return [self.labels[i] for i in self.model(images).argmax(dim=1).tolist()]


def load(folder: Path) -> Classifier:
    """Rebuild the classifier from the folder of a job's artifacts."""
    config = results.read_config(folder)
    document = spec.JobSpec.model_validate(config["spec"])
    assert isinstance(document.model, spec.Cnn | spec.ResNet | spec.Mlp)
    shape = cast(networks.Shape, tuple(config["input_shape"]))
    model = networks.build(document.model, shape, config["num_classes"])
    return Classifier(results.restore(model, folder), config["labels"])
