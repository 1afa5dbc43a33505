"""Ready-made jobs: a model, its data and its metrics, configured and never coded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dray.spec import JobSpec
from ray_workers.recipes import image_classification
from ray_workers.training.workload import Workload


@dataclass(frozen=True)
class Recipe:
    build: Callable[[JobSpec], Workload]
    """Model and data on the CPU, the same on every rank. Raises DataError."""
    preload: Callable[[], object]
    """What is worth doing once, before training processes are forked."""


RECIPES: Mapping[str, Recipe] = {
    "image_classification": Recipe(image_classification.build, image_classification.load_digits),
}
"""By the name that a job document gives as `recipe`."""
