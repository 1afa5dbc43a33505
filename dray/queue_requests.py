"""Request bodies for queues."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
)

from dray.input import units
from dray.requests import Priority
from dray.spec.fields import (
    Document,
    Int,
    Number,
    QueueName,
    Seconds,
    UserName,
    wrong,
)

_RESOURCE = r"CPU|GPU|memory|accelerator_type:[A-Za-z0-9._-]{1,64}"
MAX_AMOUNT = 2.0**60


def _amounts(value: Any, info: ValidationInfo) -> Any:
    """Check the amount of each resource. Memory can be given as a size such as `8GiB`."""
    if not isinstance(value, Mapping):
        return value
    return {name: _amount(str(name), each, f"/{info.field_name}") for name, each in value.items()}


def _amount(name: str, value: Any, pointer: str) -> float | None:
    location = f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}"
    if not re.fullmatch(_RESOURCE, name):
        known = "CPU, GPU, memory, and accelerator_type:X such as accelerator_type:H100"
        raise wrong(location, f"{name[:100]!r} is not a resource; use {known}")
    if value is None:
        return None
    if name == "memory" and isinstance(value, str):
        try:
            value = units.num_bytes(value)
        except ValueError as error:
            raise wrong(location, str(error)) from None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= MAX_AMOUNT):  # false for NaN
        raise wrong(location, "must be a number from 0 to 2**60")
    return float(value)


def _amounts_schema(*more: dict[str, Any]) -> WithJsonSchema:
    amount = {"anyOf": [{"type": "number", "minimum": 0, "maximum": MAX_AMOUNT}, *more]}
    size = {"type": "string", "pattern": units.SIZE, "examples": ["8GiB"]}
    return WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^({_RESOURCE})$"},
            "properties": {"memory": {"anyOf": [*amount["anyOf"], size]}},
            "additionalProperties": amount,
        }
    )


Amounts = Annotated[dict[str, float], BeforeValidator(_amounts), _amounts_schema()]
AmountChanges = Annotated[
    dict[str, float | None], BeforeValidator(_amounts), _amounts_schema({"type": "null"})
]
Weight = Annotated[Number, Field(gt=0.0, le=1e6)]
UserWeights = dict[UserName, Weight]
UserWeightChanges = dict[UserName, Weight | None]
Money = Annotated[Number, Field(ge=0.0, le=1e15)]
Count = Annotated[Int, Field(ge=0, le=10**9)]


class QueueRequest(Document):
    """The rules of a queue. Resources use Ray's names: `{"GPU": 8, "memory": "64GiB"}`."""

    parent: QueueName | None = None
    """A queue whose rules apply to this queue and its other children together. A parent holds no
    jobs itself."""
    weight: Weight = 1.0
    """The queue's share of the cluster, or of its parent's share, relative to the weights of the
    other queues with the same parent."""
    user_weights: UserWeights = Field(default_factory=dict)
    """Each user's share of the queue, relative to the weights of the other users. Users who are not
    listed have weight 1."""
    quota: Amounts = Field(default_factory=dict)
    """Resources that are guaranteed to the queue's jobs. The quota of a parent includes the quotas
    of its children."""
    borrowing_limit: Amounts = Field(default_factory=dict)
    """Maximum resources that the queue's running jobs can hold in addition to its quota. The quota
    must name the same resources."""
    lending_limit: Amounts = Field(default_factory=dict)
    """Maximum part of the quota that other queues can use while the queue doesn't need it. The
    quota must name the same resources."""
    limit: Amounts = Field(default_factory=dict)
    """Maximum resources that the queue's running jobs can hold together. Resources that are not
    listed are unlimited."""
    user_limit: Amounts = Field(default_factory=dict)
    """Maximum resources that each user's running jobs in the queue can hold together."""
    max_running: Count | None = None
    """Maximum number of jobs that can hold slots."""
    max_running_per_user: Count | None = None
    max_queued: Count | None = None
    """Maximum number of waiting jobs. Further submissions are refused."""
    max_queued_per_user: Count | None = None
    max_priority: Priority = 100
    """Highest priority with which jobs can be submitted. Admins can later raise a job's priority
    above this limit."""
    default_max_runtime_s: Seconds | None = None
    """`max_runtime_s` of jobs whose documents don't set it. The default is the queue's
    `max_runtime_s`. A change does not affect jobs that are already in the queue."""
    max_runtime_s: Seconds | None = None
    """Highest `max_runtime_s` with which a job can be submitted or moved to the queue."""
    budget: Money | None = None
    """Maximum cost of all jobs in the queue, in the currency of the server's prices. Once the
    budget is spent, no more jobs start, but running jobs continue."""
    monthly_budget: Money | None = None
    """Maximum cost of the queue's jobs per calendar month (UTC)."""


class QueueChangeRequest(Document):
    """Change some rules of a queue, as a JSON merge patch (RFC 7396): null restores the default, or
    removes a resource or a user's weight. Omitted rules remain unchanged."""

    parent: QueueName | None = None
    weight: Weight | None = None
    user_weights: UserWeightChanges | None = None
    quota: AmountChanges | None = None
    borrowing_limit: AmountChanges | None = None
    lending_limit: AmountChanges | None = None
    limit: AmountChanges | None = None
    user_limit: AmountChanges | None = None
    max_running: Count | None = None
    max_running_per_user: Count | None = None
    max_queued: Count | None = None
    max_queued_per_user: Count | None = None
    max_priority: Priority | None = None
    default_max_runtime_s: Seconds | None = None
    max_runtime_s: Seconds | None = None
    budget: Money | None = None
    monthly_budget: Money | None = None
