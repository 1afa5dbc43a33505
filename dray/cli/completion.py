"""Shell completion of jobs and option values."""

from __future__ import annotations

import typer

_PATIENCE_S = 1.0
_NUM_JOBS = 100

STATES = (
    *("QUEUED", "STARTING", "RUNNING", "RECOVERING", "CANCELLING"),
    *("SUCCEEDED", "FAILED", "CANCELLED"),
)


def states(incomplete: str) -> list[str]:
    return [state for state in STATES if state.startswith(incomplete.upper())]


def document_kinds(incomplete: str) -> list[str]:
    from dray.spec.authoring.starting import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


def job_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the newest jobs with their name and state; nothing if no server responds within a
    second."""
    from itertools import islice

    from dray._http.transport import Retry
    from dray.cli.display.terminal import clean
    from dray.client import Client
    from dray.errors import DrayError

    url = ctx.find_root().params.get("url")
    try:
        with Client(url, timeout=_PATIENCE_S, retry=Retry(patience_s=0.0)) as client:
            jobs = list(islice(client.jobs(page_size=_NUM_JOBS), _NUM_JOBS))
    except (DrayError, ValueError):
        return []
    found = [job for job in jobs if job.id.startswith(incomplete)]
    # typer interprets the help text as rich markup.
    return [(job.id, f"{clean(job.name)} {job.state}".replace("[", r"\[")) for job in found]
