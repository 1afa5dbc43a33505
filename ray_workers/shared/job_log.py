"""dray's own lines in a job's log."""

from __future__ import annotations


def log(sentence: str) -> None:
    """Write a line to the job's log, which is the process's standard output."""
    print(f"dray: {sentence}", flush=True)  # noqa: T201
