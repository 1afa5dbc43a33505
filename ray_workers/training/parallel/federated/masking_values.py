"""The values that clients outside of the cluster mask: both halves of a round agree on them."""

from __future__ import annotations

from dray import spec
from dray.secure_aggregation.messages import MaskingSettings

LOSS_RANGE = 1000.0
"""A larger loss counts as this."""


def masking_settings(options: spec.Federated, session: str, num_elements: int) -> MaskingSettings:
    """The public facts of a round. Its values are those of the update, and the loss."""
    secure, http = options.secure_aggregation, options.http
    assert secure is not None
    assert http is not None
    return MaskingSettings(
        session=session,
        num_values=num_elements + 1,
        threshold=secure.threshold,
        limit=options.max_update_norm,
        bits=secure.bits,
        max_weight=http.max_samples,
    )


def loss_value(loss: float, limit: float) -> float:
    """A loss as a value within the limit; one that is not a number counts as the largest."""
    return limit * (loss / LOSS_RANGE if 0 <= loss < LOSS_RANGE else 1.0)


def loss_of(mean_value: float, limit: float) -> float:
    """The mean loss, of the mean of these values."""
    return mean_value / limit * LOSS_RANGE
