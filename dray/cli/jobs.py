"""Commands that submit, list, show and end jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, JobId, app, connect
from dray.cli.exits import Exit

if TYPE_CHECKING:
    from dray.client import Client
    from dray.views import Job


@app.command()
def submit(
    document: Annotated[Path, typer.Argument(metavar="FILE", help="Job document, YAML or JSON.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field: train.epochs=3."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it until it is over.")] = False,
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
    with connect() as client:
        job = client.submit(spec, idempotency_key=key)
        if not watch:
            write_json(job) if as_json else write(f"{job.id} {job.state}: {job.reason.message}")
            return
        _watch(client, job.id, as_json)


@app.command("watch")
def watch_command(job_id: JobId, as_json: AsJson = False) -> None:
    """Show a job's progress until it is over."""
    with connect() as client:
        _watch(client, job_id, as_json)


def _watch(client: Client, job_id: str, as_json: bool) -> None:
    from dray.cli.output import warn, write_json
    from dray.cli.watch import watch
    from dray.views import JobState

    try:
        if as_json:
            job = client.wait(job_id)
            write_json(job)
        else:
            job = watch(client, job_id)
    except KeyboardInterrupt:
        warn(f"\nthe job goes on; watch it again with: dray watch {job_id}")
        raise typer.Exit(Exit.INTERRUPTED) from None
    if job.state is not JobState.SUCCEEDED:
        raise typer.Exit(Exit.JOB_ENDED_BADLY)


@app.command("ls")
def list_jobs(
    state: Annotated[list[str] | None, typer.Option(help="Only in this state.")] = None,
    queue: Annotated[str | None, typer.Option(help="Only in this queue.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Only with this label.")
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many.", min=1)] = 50,
    as_json: AsJson = False,
) -> None:
    """List jobs, newest first."""
    from itertools import islice

    from dray.cli.output import steps, table, write_json
    from dray.views import JobState

    states = [JobState(name.upper()) for name in state or ()]
    pairs = [text.partition("=") for text in label or ()]
    if any(not (key and equals) for key, equals, _ in pairs):
        raise typer.BadParameter("write a label as KEY=VALUE", param_hint="--label")
    labels = {key: value for key, _, value in pairs}
    with connect() as client:
        found = client.jobs(state=states, queue=queue, label=labels, page_size=min(limit, 100))
        jobs = list(islice(found, limit))
    if as_json:
        write_json(jobs)
        return
    table(
        ("ID", "NAME", "STATE", "STEP", "ATTEMPT", "CREATED", "REASON"),
        ((j.id, j.name, j.state, steps(j), j.attempt, j.created_at, j.reason.code) for j in jobs),
    )


def _show(job: Job, as_json: bool) -> None:
    from dray.cli.output import show_job, write_json

    write_json(job) if as_json else show_job(job)


@app.command()
def get(
    job_id: JobId,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it is over.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one job."""
    with connect() as client:
        _show(client.wait(job_id) if wait else client.get(job_id), as_json)


@app.command()
def cancel(job_id: JobId, as_json: AsJson = False) -> None:
    """Stop a job, in whatever state it is."""
    from dray.cli.output import write, write_json

    with connect() as client:
        job = client.cancel(job_id)
    write_json(job) if as_json else write(f"{job.id} {job.state}: {job.reason.message}")


@app.command()
def delete(job_id: JobId, as_json: AsJson = False) -> None:
    """Remove a finished job with its logs, checkpoints and artifacts."""
    from dray.cli.output import write

    with connect() as client:
        client.delete(job_id)
    write(json.dumps({"deleted": job_id}) if as_json else f"{job_id} deleted")
