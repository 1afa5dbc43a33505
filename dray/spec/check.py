"""Checks of a running job for faults that raise no error."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dray.spec.fields import MAX_STEPS, Document, Int


class Check(Document):
    """Which faults the ranks look for while they train."""

    replicas_every: Annotated[Int, Field(ge=1, le=MAX_STEPS)]
    """Number of optimizer steps between two comparisons of the replicas of the model. If their
    weights, optimizer states or averaged weights differ, the job returns to the last checkpoint
    that was saved while they were equal."""
