"""The list of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli import filters
from dray.cli.base import AsJson, app, connect, moment
from dray.cli.filters import (
    OnlyArray,
    OnlyLabels,
    OnlyName,
    OnlyOwner,
    OnlyProject,
    OnlyQueue,
    OnlyReservation,
    OnlySchedule,
    OnlyStates,
    OnlyText,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dray.views import Job, JobArray

_METRICS = ("val/accuracy", "val/dice", "val/r2", "val/perplexity", "val/loss", "train/loss")
"""Metrics to show if the job's document names none, in order of preference."""


@app.command("ls")
def list_jobs(
    state: OnlyStates = None,
    queue: OnlyQueue = None,
    label: OnlyLabels = None,
    name: OnlyName = None,
    text: OnlyText = None,
    array: OnlyArray = None,
    schedule: OnlySchedule = None,
    reservation: OnlyReservation = None,
    each: Annotated[
        bool, typer.Option("--each", help="List each job of an array on a separate line.")
    ] = False,
    owner: OnlyOwner = None,
    project: OnlyProject = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only jobs submitted since this time, such as 2h (2 hours ago) or 2026-01-31.",
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only jobs submitted before this time.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SEARCH", help="Only jobs that match a search, such as 'val/loss < 0.1'."
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="KEY", help="Show this metric, such as val/loss.")
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Sort by a column, such as best:val/accuracy, lr or cost; -COLUMN for descending "
            "order.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMNS", help="Show these columns, such as name,lr,best:val/accuracy,cost."
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            metavar="GROUP",
            help="Show groups instead of jobs: sweep, experiment, user or label:KEY. With --sort, "
            "each group's best value, mean and standard deviation.",
        ),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="With --columns: print all jobs as CSV.")
    ] = False,
    parquet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --columns: write all jobs, at most 100,000, to a Parquet file.",
            dir_okay=False,
        ),
    ] = None,
    view: Annotated[
        str | None,
        typer.Option(
            metavar="VIEW",
            help="Use the filter, order and columns of a saved view: NAME, or OWNER/NAME. Other "
            "options replace the view's options.",
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Save the filter, order and columns as a view (see `dray views`). With --project, "
            "the view is for the project.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="Maximum number of jobs.", min=1)
    ] = 50,
    everything: Annotated[
        bool, typer.Option("--all", help="List all jobs, ignoring --limit.")
    ] = False,
    as_json: AsJson = False,
    brief: Annotated[
        bool, typer.Option("--brief", help="With --json: omit the documents.")
    ] = False,
) -> None:
    """List jobs, newest first or in the order of --sort.

    An array is shown as one line with the number of its jobs in each state; --json, --sort and
    --columns list each job.
    """
    from itertools import islice

    from dray.cli.display import job_tables
    from dray.cli.display.output import warn, write_json

    if brief and not as_json:
        raise typer.BadParameter("requires --json", param_hint="--brief")
    shown = job_tables.Shown(
        sort=sort,
        columns=columns,
        group=group,
        as_csv=as_csv,
        parquet=parquet,
        as_json=as_json,
        brief=brief,
        limit=None if everything else limit,
    )
    with connect() as client:
        given = {
            **filters.arguments(
                client,
                state=state,
                queue=queue,
                label=label,
                name=name,
                text=text,
                owner=owner,
                project=project,
                array=array,
                schedule=schedule,
                reservation=reservation,
            ),
            "created_after": moment(since, "--since"),
            "created_before": moment(until, "--until"),
            "where": where,
        }
        if view is not None:
            given, shown = job_tables.with_view(client, view, given, shown)
        if save is not None:
            job_tables.save(client, save, given, shown)
        if shown.is_table:
            job_tables.show(client, given, shown)
            return
        found = client.jobs(
            **given,
            collapse_arrays=not (each or as_json or array),
            brief=brief,
            page_size=500 if everything else min(limit + 1, 500),
        )
        jobs = list(found if everything else islice(found, limit + 1))
        more = not everything and len(jobs) > limit
        if more:
            jobs.pop()
        if as_json:
            write_json(jobs)
            return
        with_arrays = [] if each or array else [job.array_id for job in jobs if job.array_id]
        arrays = {array_id: client.array(array_id) for array_id in with_arrays}
    _show(jobs, metric, arrays)
    if more:
        warn(f"only {limit} jobs are listed; use --all to list all jobs")


def _show(jobs: list[Job], metric: str | None, arrays: Mapping[str, JobArray]) -> None:
    """Write the table. Each array in `arrays` is represented by one of its jobs."""
    from dray.cli.display.output import age, steps
    from dray.cli.display.tables import shortest_prefixes, table

    def asked(j: Job) -> tuple[object, ...]:
        spares = f"{j.world_size} + {j.spares} spare{'s'[: j.spares > 1]}"
        return (spares if j.spares else j.world_size, j.priority, j.queue)

    # Only lists in which each job of an array has its own line have this column.
    variant = ["VARIANT"] if not arrays and any(j.variant for j in jobs) else []

    def row(j: Job) -> tuple[object, ...]:
        array = arrays.get(j.array_id or "")
        if array is None:
            about = (
                j.id,
                j.name,
                *([j.variant] if variant else []),
                j.state,
                j.position,
                steps(j),
                _metric(j, metric),
            )
            tags = ", ".join(j.tags) or None
            return (*about, *asked(j), j.attempt, tags, age(j.created_at), j.reason.message)
        running = f", {array.max_running} at a time" if array.max_running else ""
        what = "trial" if array.is_sweep else "job"
        size = f"{array.size} {what}{'' if array.size == 1 else 's'}{running}"
        nothing = (None, None, None)
        created = (None, None, age(array.created_at))
        return (array.id, array.name, array.state, *nothing, *asked(j), *created, size)

    table(
        (
            *("ID", "NAME", *variant, "STATE", "PLACE", "STEP"),
            *("METRIC", "WORKERS", "PRIORITY", "QUEUE", "ATTEMPT", "TAGS", "CREATED", "REASON"),
        ),
        map(row, jobs),
        flexible=("NAME", *variant, "TAGS", "REASON"),
        optional=(
            *("ATTEMPT", "QUEUE", "CREATED", "PRIORITY", "WORKERS", "TAGS", "METRIC", "PLACE"),
            *("STEP", "REASON", *variant),
        ),
        shorter={"ID": shortest_prefixes},
    )


def _metric(job: Job, wanted: str | None) -> str | None:
    """Return the wanted metric, or by default the job's `checkpoint.best` or a common metric."""
    from dray.cli.display.output import number

    judged_by = (job.spec.get("checkpoint") or {}).get("best")
    names = (wanted,) if wanted else (judged_by, *_METRICS, *sorted(job.summary))
    found = next((name for name in names if name in job.summary), None)
    return None if found is None else f"{found} {number(job.summary[found])}"
