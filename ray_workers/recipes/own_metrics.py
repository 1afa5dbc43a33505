"""The user's own metrics of a language model, from the code of the job."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics import Metric, MetricCollection

from dray import spec
from ray_workers.recipes import measures
from ray_workers.recipes.models import imported
from ray_workers.training.core.errors import ModelError


class OwnMetrics:
    """Creates the metrics of dray and of the user."""

    def __init__(self, method: spec.Sft, code: str | None, vocabulary_size: int) -> None:
        """Raises ModelError if a metric does not exist, or can't process a batch."""
        self._options = {
            name: spec.Imported.model_validate({"import": target, "code": code})
            for name, target in method.metrics.items()
        }
        for name, options in self._options.items():
            _try_out(f"method.metrics.{name}", options, vocabulary_size)

    def __call__(self) -> MetricCollection:
        every: dict[str, Any] = dict(measures.of_tokens().items())
        every |= {name: imported.created(options) for name, options in self._options.items()}
        # Otherwise, metrics whose states are equal after the first update would share them.
        return MetricCollection(every, compute_groups=False)


def _try_out(field: str, options: spec.Imported, vocabulary_size: int) -> None:
    """Compute a metric of a small batch in which some tokens don't count."""
    metric = imported.created(options)
    if not isinstance(metric, Metric):
        raise ModelError(
            f"{field}: {options.target} is a {type(metric).__name__}, not a torchmetrics.Metric"
        )
    logits = torch.zeros(2, 3, vocabulary_size)
    targets = torch.tensor([[0, 1, measures.IGNORED], [measures.IGNORED, 0, 1]])
    try:
        metric.update(logits, targets)
        float(metric.compute())
    except Exception as error:
        raise ModelError(
            f"{field}: {options.target} can't compute a number from logits of shape "
            f"{tuple(logits.shape)} and the next tokens, of shape {tuple(targets.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
