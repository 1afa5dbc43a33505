"""The selection of series and points in a request. The API parses the selection, and the service
applies it in SQL."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dray.filters import MAX_POINTS


class SeriesFilter(BaseModel):
    """Selects series of one rank of a job."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    keys: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Series to return, as repeated parameters or separated by commas; by default all series. A
    value that is the name of a series selects that series, even if the name contains commas."""
    rank: Annotated[int, Field(ge=0, lt=2**31)] = 0
    max_points: Annotated[int, Field(ge=2, le=MAX_POINTS)] = 2000
    """Maximum number of points of each series. Extremes and the first and last point are kept."""


class MetricsFilter(SeriesFilter):
    """Selects series of metrics, and a part of their steps."""

    after_step: Annotated[int, Field(ge=-1, lt=2**63)] | None = None
    """Return only steps after this step; pass `next_step` of the previous response."""
    until_step: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Return only steps up to this step. Together with `after_step`, this returns a part of the
    series in more detail."""
    in_order: bool = False
    """Return the first `max_points` points of each series without downsampling. Pass `next_step` to
    the next call to continue."""
    times: bool = False
    """Also return the time at which each point was reported."""


class SystemMetricsFilter(SeriesFilter):
    """Selects series of the resource usage of a rank and its node, and a time range."""

    after_time: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Return only points after this time, in Unix seconds; pass `next_time` of the previous
    response."""
