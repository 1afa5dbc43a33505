"""The steps that are profiled."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dray.spec.fields import MAX_STEPS, Document, Int


class Profile(Document):
    """Some steps are recorded by torch's profiler. A trace and a summary of where their time went
    are left among the artifacts: rank 0's under `profile/`, those of rank 1 under
    `profile/rank-1/`."""

    at_step: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 10
    """The first of them; the very first steps of a job are not like the others."""
    num_steps: Annotated[Int, Field(ge=1, le=50)] = 3
    """How many are recorded."""
    ranks: Annotated[list[Annotated[Int, Field(ge=0)]], Field(min_length=1, max_length=64)] = [0]
    """Whose steps: of a pipeline, say, one of each stage."""
