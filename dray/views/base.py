"""Types that many answers contain."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

MetricValue = float | Literal["NaN", "Infinity", "-Infinity"]
"""A number, or a string if JSON can't represent the number."""


class View(BaseModel):
    """Base of every answer."""

    # Each class is built at its first use, not when the command line starts.
    model_config = ConfigDict(extra="ignore", defer_build=True)


class Reason(View):
    """A reason, as a code for programs and a sentence for people."""

    code: str
    message: str


class Problem(View):
    """RFC 9457 problem+json with a stable code."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    pointer: str | None = None
    """JSON pointer to the field at fault, such as `/resources/num_workers`."""
    hint: str | None = None
    instance: str | None = None
    request_id: str | None = None
    """Id of the request in the answer's `X-Request-Id` and in the server's log."""
