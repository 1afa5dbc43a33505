"""The users who make requests."""

from __future__ import annotations

from typing import NamedTuple


class Caller(NamedTuple):
    """The user who makes a request."""

    name: str
    is_admin: bool
