"""Values that clients mask in secure aggregation, and the sum that the server can see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from dray import spec
from dray.secure_aggregation.messages import MaskingSettings
from ray_workers.training.core.errors import RoundsError

LOSS_RANGE = 1000.0
"""Larger losses are clipped to this value."""


@dataclass(frozen=True)
class SecureSum:
    """Everything that the server learns about the updates of a round."""

    updates: Tensor
    """float64 (elements,): the weighted sum of the updates, on the CPU."""
    weight: int
    """The sum of the weights."""
    loss: float
    """The weighted mean of the losses."""
    num_within: int
    """The total weight of the updates that were not clipped."""


@contextmanager
def needing_cryptography() -> Iterator[None]:
    """A context manager that raises RoundsError if an import in its body fails. The imported
    modules need the cryptography package, which must be installed on nodes only for jobs with
    secure aggregation."""
    try:
        yield
    except ImportError as error:
        raise RoundsError(
            "federated.secure_aggregation requires the cryptography package on the nodes: add it "
            "to "
            'environment.python_packages, as "cryptography>=44.0"'
        ) from error


def masking_settings(
    options: spec.Federated, session: str, num_values: int, max_weight: int
) -> MaskingSettings:
    """Return the parameters of a round that are known to both the clients and the server."""
    secure = options.secure_aggregation
    assert secure is not None
    return MaskingSettings(
        session=session,
        num_values=num_values,
        threshold=secure.threshold,
        limit=options.max_update_norm,  # a limit for the norm, and therefore for each element
        bits=secure.bits,
        max_weight=max_weight,
    )


def outside_settings(options: spec.Federated, session: str, num_elements: int) -> MaskingSettings:
    """Return the parameters for clients outside the cluster, which mask their updates and
    losses."""
    assert options.http is not None
    return masking_settings(options, session, num_elements + 1, options.http.max_samples)


def loss_value(loss: float, limit: float) -> float:
    """Encode a loss as a value within the limit. Infinite losses and NaN are encoded as the largest
    loss."""
    return limit * (loss / LOSS_RANGE if abs(loss) < LOSS_RANGE else 1.0)


def loss_of(value: float, limit: float) -> float:
    """Decode a value to a loss, or a mean of values to a mean loss."""
    return value / limit * LOSS_RANGE
