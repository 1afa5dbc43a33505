"""Types that are used in many responses."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

MetricValue = float | Literal["NaN", "Infinity", "-Infinity"]
"""A number, or a string if JSON can't represent the number."""


class View(BaseModel):
    """Base class of all responses."""

    # Validators are built on first use, so that the command line starts quickly.
    model_config = ConfigDict(extra="ignore", defer_build=True)


class Reason(View):
    """A reason, as a code for programs and a message for people."""

    code: str
    message: str


class Problem(View):
    """An error in the format of RFC 9457 (problem+json), with a stable code."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    pointer: str | None = None
    """JSON pointer to the invalid field, such as `/resources/num_workers`."""
    hint: str | None = None
    instance: str | None = None
    request_id: str | None = None
    """Id of the request, as in the `X-Request-Id` header and in the server's log."""
