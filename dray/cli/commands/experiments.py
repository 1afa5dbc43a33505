"""Commands that show and change experiments."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, JobIds, app, connect
from dray.cli.choosing import read_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dray.views import ExperimentSummary

group = typer.Typer(
    name="experiment", help="Show and change groups of jobs that share the label `experiment`."
)
app.add_typer(group)

Name = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="Value of the label `experiment`.")]
TRIES = 5
"""How often a change of the pinned jobs is tried if other users change the experiment."""


@group.command("ls")
def list_experiments(as_json: AsJson = False) -> None:
    """List experiments with their number of jobs."""
    from dray.cli.display.tables import listing

    with connect() as client:
        found = list(client.experiments(page_size=500))
    listing(
        found,
        as_json,
        ("EXPERIMENT", "JOBS", "NEWEST JOB", "BASELINE"),
        lambda one: (one.name, one.num_jobs, one.newest_job, one.baseline),
        flexible=("EXPERIMENT",),
        optional=("BASELINE",),
    )


@group.command("show")
def show_experiment(name: Name, as_json: AsJson = False) -> None:
    """Show an experiment: its notes, baseline and pinned jobs, the states of its jobs, and the
    range of each metric."""
    with connect() as client:
        found = client.experiment(name)
    _show(found, as_json)


@group.command("edit")
def edit_experiment(
    name: Name,
    notes: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Replace the notes with this Markdown text (- for stdin).",
            show_default=False,
        ),
    ],
    revision: Annotated[
        int | None,
        typer.Option(metavar="N", help="Only if the experiment is still at this revision."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Edit the notes of an experiment."""
    text = sys.stdin.read() if notes == "-" else notes
    with connect() as client:
        found = client.change_experiment(name, notes=text, revision=revision)
    _show(found, as_json)


@group.command("baseline")
def pin_baseline(
    name: Name,
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="The job to pin.")] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove the baseline.")] = False,
    as_json: AsJson = False,
) -> None:
    """Pin the job with which the other jobs of an experiment are compared."""
    if (job is None) != none:
        raise typer.BadParameter("specify a job, or use --none", param_hint="JOB")
    with connect() as client:
        found = client.pin_baseline(name, None if job is None else client.resolve(job))
    _show(found, as_json)


@group.command("pin")
def pin_jobs(name: Name, jobs: JobIds, as_json: AsJson = False) -> None:
    """Pin jobs, so that they come first in the lists of the experiment."""
    _change_pinned(name, jobs, lambda old, new: [*old, *new], as_json)


@group.command("unpin")
def unpin_jobs(name: Name, jobs: JobIds, as_json: AsJson = False) -> None:
    """Unpin jobs of an experiment."""
    _change_pinned(name, jobs, lambda old, gone: [one for one in old if one not in gone], as_json)


def _change_pinned(
    name: str,
    jobs: Sequence[str],
    changed: Callable[[Sequence[str], Sequence[str]], Sequence[str]],
    as_json: bool,
) -> None:
    from dray.errors import ExperimentChanged

    with connect() as client:
        ids = read_jobs(client, jobs)
        for tries_left in reversed(range(TRIES)):
            found = client.experiment(name)
            pinned = list(dict.fromkeys(changed(found.pinned, ids)))
            try:
                found = client.change_experiment(name, pinned=pinned, revision=found.revision)
                break
            except ExperimentChanged:
                if not tries_left:
                    raise
    _show(found, as_json)


def _show(found: ExperimentSummary, as_json: bool) -> None:
    from dray.cli.display.output import cell, number, write, write_json, write_text
    from dray.cli.display.tables import table

    if as_json:
        write_json(found)
        return
    states = ", ".join(f"{count} {state}" for state, count in found.states.items())
    write_text(
        f"{found.name}: {found.num_jobs} {'job' if found.num_jobs == 1 else 'jobs'}: {states}"
    )
    write_text(f"baseline: {found.baseline or 'none'}")
    if found.pinned:
        write_text(f"pinned: {', '.join(found.pinned)}")
    if found.updated_at is not None:
        write_text(
            f"revision {found.revision}, changed by {found.updated_by} at {cell(found.updated_at)}"
        )
    for line in found.notes.splitlines():
        write(line)
    if found.num_summarised < found.num_jobs:
        write_text(f"metrics of the {found.num_summarised} newest jobs:")
    table(
        ("METRIC", "JOBS", "MINIMUM", "OF JOB", "MAXIMUM", "BY JOB"),
        (
            (
                *(one.key, one.num_jobs, number(one.least), one.least_job),
                *(number(one.greatest), one.greatest_job),
            )
            for one in found.metrics
        ),
        flexible=("METRIC",),
        shorter={"OF JOB": _short, "BY JOB": _short},
    )


def _short(ids: Sequence[str]) -> list[str]:
    from dray.cli.display.tables import shortest_prefixes

    return shortest_prefixes(ids)
