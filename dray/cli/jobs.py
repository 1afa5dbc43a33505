"""Commands that submit, watch, list, show and end jobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli import completion
from dray.cli.base import (
    AsJson,
    AsJsonLines,
    Failures,
    JobId,
    JobIds,
    app,
    connect,
    interruptible,
)
from dray.cli.exits import Exit

if TYPE_CHECKING:
    from datetime import datetime

    from dray.client import Client
    from dray.views import Job


@app.command()
def submit(
    document: Annotated[
        Path, typer.Argument(metavar="FILE", help="Job document, YAML or JSON; - reads it here.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field: train.epochs=3."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it until it is over.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the document here and send nothing.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option("--idempotency-key", help="Submitting twice with one key makes one job."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Queue a job."""
    from dray.cli.output import write, write_json
    from dray.documents import apply_settings, load_document

    spec = apply_settings(load_document(document), settings or [])
    if dry_run:
        _check(spec, str(document), as_json)
        return
    with connect() as client:
        job = client.submit(spec, idempotency_key=key)
        if not watch:
            write_json(job) if as_json else write(f"{job.id} {job.state}: {job.reason.message}")
            return
        _watch(client, job.id, as_json)


def _check(document: dict[str, Any], source: str, as_json: bool) -> None:
    from dray.cli.output import write, write_json
    from dray.documents import check

    spec = check(document, source=source)
    if as_json:
        write_json(spec)
        return
    what = spec.recipe or (spec.script.entrypoint if spec.script else "")
    workers = spec.resources.num_workers
    whom = f"{workers} worker" if workers == 1 else f"{workers} workers"
    write(f"{source} is a job: {what} on {whom}. Nothing was sent.")


@app.command("watch")
def watch_command(job_id: JobId, as_json: AsJson = False) -> None:
    """Show a job's progress until it is over."""
    with connect() as client:
        _watch(client, job_id, as_json)


def _watch(client: Client, job_id: str, as_json: bool) -> None:
    from dray.cli.output import write_json
    from dray.cli.watch import watch

    with interruptible(f"the job goes on; watch it again with: dray watch {job_id}"):
        if as_json:
            job = client.wait(job_id)
            write_json(job)
        else:
            job = watch(client, job_id)
    _exit_as(job)


def _exit_as(*jobs: Job) -> None:
    from dray.views import JobState

    if any(job.state in (JobState.FAILED, JobState.CANCELLED) for job in jobs):
        raise typer.Exit(Exit.JOB_ENDED_BADLY)


@app.command()
def wait(
    jobs: JobIds,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", help="At most so long.", min=0)
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(help="Or until it is in this state.", autocompletion=completion.states),
    ] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Wait until jobs are over.

    Exits with 1 if one failed or was cancelled, with 5 if the time was up.
    """
    import time

    from dray.cli.output import write, write_json_line

    states = _states(state)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    done = []
    with connect() as client, interruptible("the jobs go on"):
        for job_id in jobs:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            job = client.wait(job_id, left_s, states)
            done.append(job)
            write_json_line(job) if as_json else write(
                f"{job.id} {job.state}: {job.reason.message}"
            )
    _exit_as(*done)


def _states(names: list[str] | None) -> list[str]:
    wanted = [name.upper() for name in names or ()]
    unknown = [name for name in wanted if name not in completion.STATES]
    if unknown:
        known = ", ".join(completion.STATES)
        raise typer.BadParameter(f"{unknown[0]} is none of {known}", param_hint="--state")
    return wanted


@app.command("ls")
def list_jobs(
    state: Annotated[
        list[str] | None,
        typer.Option(help="Only in this state.", autocompletion=completion.states),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Only in this queue.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only with this label.")
    ] = None,
    owner: Annotated[str | None, typer.Option(help="Only of this owner.")] = None,
    project: Annotated[str | None, typer.Option(help="Only of this project.")] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Submitted then or later: 2h, 2026-01-31.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Submitted earlier than that.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", help="At most so many.", min=1)] = 50,
    everything: Annotated[bool, typer.Option("--all", help="However many there are.")] = False,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from itertools import islice

    from dray.cli.output import age, steps, warn, write_json
    from dray.cli.tables import table

    with connect() as client:
        found = client.jobs(
            state=_states(state),
            queue=queue,
            label=_labels(label),
            owner=owner,
            project=project,
            created_after=_moment(since, "--since"),
            created_before=_moment(until, "--until"),
            page_size=500 if everything else min(limit + 1, 500),
        )
        jobs = list(found if everything else islice(found, limit + 1))
    more = not everything and len(jobs) > limit
    if more:
        jobs.pop()
    if as_json:
        write_json(jobs)
        return
    table(
        ("ID", "NAME", "STATE", "STEP", "ATTEMPT", "CREATED", "REASON"),
        (
            (j.id, j.name, j.state, steps(j), j.attempt, age(j.created_at), j.reason.code)
            for j in jobs
        ),
        flexible=("NAME",),
        optional=("ATTEMPT", "REASON"),
    )
    if more:
        warn(f"there are more than {limit}; --all lists them")


def _labels(texts: list[str] | None) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts or ()]
    if any(not (key and equals) for key, equals, _ in pairs):
        raise typer.BadParameter("write a label as KEY=VALUE", param_hint="--label")
    return {key: value for key, _, value in pairs}


def _moment(text: str | None, option: str) -> datetime | None:
    """A time ago (`90s`, `2h`, `3d`), or ISO 8601, which without a zone is this machine's."""
    import re
    from datetime import UTC, datetime, timedelta

    if text is None:
        return None
    ago = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    if ago:
        unit = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}[ago[2]]
        return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * unit)
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time: write 90s, 2h, 3d, 2026-01-31 or 2026-01-31T12:00:00Z",
            param_hint=option,
        ) from None


@app.command()
def get(
    job_id: JobId,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one job.

    Exits with 0 however it ended; wait tells that by its exit code.
    """
    from dray.cli.output import show_job, write_json

    with connect() as client, interruptible("the job goes on"):
        job = client.wait(job_id) if wait else client.get(job_id)
    write_json(job) if as_json else show_job(job)


@app.command()
def cancel(jobs: JobIds, as_json: AsJsonLines = False) -> None:
    """Stop jobs, in whatever state they are."""
    from dray.cli.output import write, write_json_line

    failures = Failures()
    with connect() as client:
        for job_id in jobs:
            with failures.noted():
                job = client.cancel(job_id)
                if as_json:
                    write_json_line(job)
                else:
                    write(f"{job.id} {job.state}: {job.reason.message}")
    failures.end()


@app.command()
def delete(jobs: JobIds, as_json: AsJsonLines = False) -> None:
    """Remove finished jobs and all that they left.

    Logs, metrics, checkpoints and artifacts go with them.
    """
    import json

    from dray.cli.output import write

    failures = Failures()
    with connect() as client:
        for job_id in jobs:
            with failures.noted():
                client.delete(job_id)
                write(json.dumps({"deleted": job_id}) if as_json else f"{job_id} deleted")
    failures.end()
