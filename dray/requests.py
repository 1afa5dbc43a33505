"""The small documents that ask something of a running job."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dray.spec.fields import MAX_STEPS, Document, Int, Number
from dray.views import DrillKind

MAX_RANK = 1_000_000
MAX_GRACE_S = 24 * 3600


class PreemptRequest(Document):
    """Ask a job to save a checkpoint and leave its slots."""

    grace_s: Annotated[Number, Field(ge=0, le=MAX_GRACE_S)] | None = None
    """Seconds until it is ended if it has not left; by default the server's."""


class DrillRequest(Document):
    """Try a fault on a job."""

    kind: DrillKind
    rank: Annotated[Int, Field(ge=0, le=MAX_RANK)] = 0
    """Whom it strikes; of no meaning for `preempt`."""
    at_step: Annotated[Int, Field(ge=0, le=MAX_STEPS)] | None = None
    """Strike when so many optimizer steps are done; left out: at once."""
