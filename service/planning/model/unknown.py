"""The error of a job that can't be planned."""

from __future__ import annotations


class Unknown(Exception):
    """The job can't be planned before it runs. The message states the reason."""
