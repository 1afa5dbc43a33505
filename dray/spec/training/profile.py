"""The steps that are profiled."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dray.spec.fields import MAX_STEPS, Document, Int


class Profile(Document):
    """Steps to record with torch's profiler. A trace and a summary of the time spent become
    artifacts: rank 0's under `profile/`, those of rank 1 under `profile/rank-1/`."""

    at_step: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 10
    """First step to record; the very first steps of a job are not representative."""
    num_steps: Annotated[Int, Field(ge=1, le=50)] = 3
    """Number of steps to record."""
    ranks: Annotated[list[Annotated[Int, Field(ge=0)]], Field(min_length=1, max_length=64)] = [0]
    """Ranks to record, such as one of each stage of a pipeline."""
