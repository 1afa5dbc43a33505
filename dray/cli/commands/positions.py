"""Commands that change waiting jobs and their positions in the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, AsJsonLines, app, connect
from dray.cli.bulk import (
    DryRun,
    Expect,
    Where,
    array_line,
    change_matching,
    change_named,
    searched,
)
from dray.cli.choosing import Owner, References, Yes
from dray.cli.commands.queues import number_or_none

if TYPE_CHECKING:
    from dray.client import Client
    from dray.views import ArrayChange, Job


@app.command()
def hold(
    jobs: References = None,
    where: Where = None,
    owner: Owner = "@me",
    dry_run: DryRun = False,
    expect: Expect = None,
    yes: Yes = False,
    as_json: AsJsonLines = False,
) -> None:
    """Keep waiting jobs from starting until they are released."""
    search = searched(jobs, where, owner, dry_run=dry_run, expect=expect, yes=yes)
    if search is not None:
        change_matching("hold", search, as_json)
        return
    change_named(
        jobs or (),
        as_json,
        lambda client, job_id: client.hold(job_id),
        lambda client, array_id: client.hold_array(array_id),
        _state_line,
    )


@app.command()
def release(
    jobs: References = None,
    where: Where = None,
    owner: Owner = "@me",
    dry_run: DryRun = False,
    expect: Expect = None,
    yes: Yes = False,
    as_json: AsJsonLines = False,
) -> None:
    """Allow held jobs to start."""
    search = searched(jobs, where, owner, dry_run=dry_run, expect=expect, yes=yes)
    if search is not None:
        change_matching("release", search, as_json)
        return
    change_named(
        jobs or (),
        as_json,
        lambda client, job_id: client.release(job_id),
        lambda client, array_id: client.release_array(array_id),
        _state_line,
    )


@app.command()
def move(
    jobs: References = None,
    queue: Annotated[str | None, typer.Option(help="Move the jobs to this queue.")] = None,
    first: Annotated[
        bool,
        typer.Option(
            "--first",
            help="Move the jobs ahead of all other jobs of the same priority; admins only.",
        ),
    ] = False,
    where: Where = None,
    owner: Owner = "@me",
    dry_run: DryRun = False,
    expect: Expect = None,
    yes: Yes = False,
    as_json: AsJsonLines = False,
) -> None:
    """Move waiting jobs to another queue, or to the front.

    Several jobs are moved to the front in the given order.
    """
    if queue is None and not first:
        raise typer.BadParameter("specify a destination: --queue QUEUE, --first, or both")
    search = searched(jobs, where, owner, dry_run=dry_run, expect=expect, yes=yes)
    if search is not None:
        given = {"queue": queue, "first": first or None}
        change_matching("move", search, as_json, given)
        return
    change_named(
        jobs or (),
        as_json,
        lambda client, job_id: client.move(job_id, queue, first=first),
        lambda client, array_id: client.move_array(array_id, queue, first=first),
        _state_line,
        is_reversed=first,
    )


@app.command()
def change(
    jobs: References,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            help="Change a field: resources.num_workers=2. null restores its default.",
        ),
    ],
    as_json: AsJsonLines = False,
) -> None:
    """Change the documents of waiting jobs.

    Example: dray change JOB --set resources.num_workers=2 --set max_runtime_s=2h
    """
    from dray.documents import apply_settings

    patch = apply_settings({}, settings)
    change_named(
        jobs or (),
        as_json,
        lambda client, job_id: client.change(job_id, patch),
        _refuse_array,
        _state_line,
    )


def _refuse_array(client: Client, array_id: str) -> ArrayChange:
    raise typer.BadParameter(
        f"can't be changed as a whole: give the indices of its jobs, such as {array_id}/0-9",
        param_hint="JOB",
    )


@app.command()
def priority(
    jobs: References = None,
    number: Annotated[
        int, typer.Argument(metavar="N", help="From 0 to 100.", min=0, max=100)
    ] = ...,  # type: ignore[assignment]
    where: Where = None,
    owner: Owner = "@me",
    dry_run: DryRun = False,
    expect: Expect = None,
    yes: Yes = False,
    as_json: AsJsonLines = False,
) -> None:
    """Change the priority of jobs that have not ended."""
    search = searched(jobs, where, owner, dry_run=dry_run, expect=expect, yes=yes)
    if search is not None:
        change_matching("priority", search, as_json, {"priority": number})
        return
    change_named(
        jobs or (),
        as_json,
        lambda client, job_id: client.set_priority(job_id, number),
        lambda client, array_id: client.set_array_priority(array_id, number),
        _state_line,
    )


@app.command("max-running")
def max_running(
    array: Annotated[
        str, typer.Argument(metavar="ARRAY", help="An array's id, a prefix of it, or its name.")
    ],
    number: Annotated[str, typer.Argument(metavar="N", help="A number of jobs, or none.")],
    as_json: AsJson = False,
) -> None:
    """Change how many jobs of an array or sweep run at the same time.

    Running jobs are not stopped.
    """
    from dray.cli.display.output import write_json, write_text

    limit = number_or_none(number, int, "N")
    with connect() as client:
        change = client.set_max_running(
            client.resolve(array, arrays=True), None if limit is None else int(limit)
        )
    write_json(change) if as_json else write_text(array_line(change))


def _state_line(job: Job) -> str:
    """Return a line such as `job-1 QUEUED in night, priority 50: is held by ann; ...`."""
    return f"{job.id} {job.state} in {job.queue}, priority {job.priority}: {job.reason.message}"
