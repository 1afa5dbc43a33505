"""Lines of dray itself in the log of a job."""

from __future__ import annotations


def log(sentence: str) -> None:
    """A line in the job's log, which is what its standard output is."""
    print(f"dray: {sentence}", flush=True)  # noqa: T201
