"""Commands that compare jobs, and edit tags and notes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dray.cli.base import AsJson, JobIds, app, connect
from dray.cli.bulk import DryRun, Expect, Where, change_matching, searched
from dray.cli.choosing import Owner, Yes, read_job, read_jobs
from dray.cli.completion import job_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dray.views import (
        Annotations,
        ComparedJob,
        ComparedMetric,
        Comparison,
        FinalMetric,
        SyncFigures,
    )

BASELINE = "baseline"


@app.command()
def compare(
    jobs: JobIds,
    metric: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Only this metric, such as val/loss.")
    ] = None,
    extremes: Annotated[
        bool, typer.Option("--extremes", help="Also show the minimum and maximum of each metric.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare jobs side by side: differences in their documents, times, costs and metrics.

    The pinned baseline of the experiment comes first, and changes in metrics are relative to the
    baseline.
    """
    from dray.cli.display.output import write_json

    with connect() as client:
        found = client.compare(read_jobs(client, jobs))
    if as_json:
        write_json(found)
        return
    _show(found, metric, extremes)


def _show(found: Comparison, wanted: Sequence[str] | None, extremes: bool) -> None:
    from dray.cli.display.output import write
    from dray.cli.display.tables import shortest_prefixes, table

    ids = shortest_prefixes([job.id for job in found.jobs])
    rows = [*_about(found), *_fields(found), *_keeping_in_step(found)]
    for one in found.metrics:
        if wanted is None or one.key in wanted:
            rows += _metric(one, extremes)
    num_jobs = _that_fit(rows, len(ids))
    for first in range(0, len(ids), num_jobs):
        if first:
            write("")
        block = slice(1 + first, 1 + first + num_jobs)
        some = ids[first : first + num_jobs]
        table(("", *some), [(row[0], *row[block]) for row in rows], flexible=some)


def _that_fit(rows: Sequence[tuple[object, ...]], num_jobs: int) -> int:
    """Return the number of jobs that fit side by side on the terminal."""
    from dray.cli.display import terminal
    from dray.cli.display.tables import GAP, LEAST

    if not sys.stdout.isatty():
        return num_jobs
    longest = max(len(str(row[0])) for row in rows)
    return max(1, (terminal.width() - longest) // (LEAST + len(GAP)))


def _about(found: Comparison) -> Iterator[tuple[object, ...]]:
    """Yield rows with the names and outcomes of the jobs, omitting empty rows."""
    from dray.cli.display.output import duration
    from dray.input.units import money

    def row(name: str, values: Sequence[object]) -> Iterator[tuple[object, ...]]:
        if any(value not in (None, "") for value in values):
            yield (name, *(None if value == "" else value for value in values))

    jobs = found.jobs
    yield from row("name", [job.name for job in jobs])
    yield from row("variant", [job.variant for job in jobs])
    yield from row("experiment", [job.experiment for job in jobs])
    marks = [BASELINE if job.id == found.baseline else None for job in jobs]
    yield from row("", marks)
    yield from row("tags", [", ".join(job.tags) for job in jobs])
    yield from row("state", [job.state for job in jobs])
    yield from row("workers", [job.world_size for job in jobs])
    yield from row("waited", [duration(job.waited_s) for job in jobs])
    yield from row("ran", [None if job.ran_s is None else duration(job.ran_s) for job in jobs])
    yield from row("useful", [_useful(job) for job in jobs])
    yield from row("cost", [job.cost and money(job.cost.total, job.cost.currency) for job in jobs])


def _useful(job: ComparedJob) -> str | None:
    share = None if job.goodput is None else job.goodput.useful_share
    return None if share is None else f"{share:.1%}"


def _fields(found: Comparison) -> Iterator[tuple[object, ...]]:
    for one in found.differences:
        yield (as_path(one.pointer), *map(_cell, one.values))


def _keeping_in_step(found: Comparison) -> Iterator[tuple[object, ...]]:
    """Yield rows with the cost of keeping the ranks' copies in sync, if the jobs used different
    methods or reported the cost."""
    from dray.cli.display.output import number, size

    ways = [None if one is None else one.topology for one in found.sync]
    is_reported = any(one is not None and one.sent_bytes is not None for one in found.sync)
    if not is_reported and len(set(ways)) < 2:
        return
    yield ("cost of sync", *ways)

    def row(name: str, of: Callable[[SyncFigures], object]) -> tuple[object, ...]:
        return (f"  {name}", *(None if one is None else of(one) for one in found.sync))

    yield row("steps", lambda one: one.steps)
    yield row("samples per second", lambda one: number(one.samples_per_s))
    yield row(
        "sent per step",
        lambda one: None if one.sent_bytes is None else size(round(one.sent_bytes)),
    )
    yield row("mean staleness", lambda one: number(one.staleness_mean))
    yield row("maximum staleness", lambda one: number(one.staleness_max))
    yield row("distance from consensus", lambda one: number(one.consensus_distance))
    yield row("val/loss", lambda one: number(one.loss))


def as_path(pointer: str) -> str:
    """Convert a JSON pointer to the search notation: `train.optimizer.lr`, `script.args[0]`."""
    path = ""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if name.isdigit() and path:
            path += f"[{name}]"
        elif name.replace("_", "a").isalnum() and name.isascii():
            path += f".{name}" if path else name
        else:
            path += f'["{name}"]'
    return path


def _cell(value: object) -> str | None:
    import json

    if value is None or isinstance(value, str):
        return value
    # Don't round: different learning rates could look equal.
    return json.dumps(value)


def _metric(one: ComparedMetric, extremes: bool) -> Iterator[tuple[object, ...]]:
    from dray.cli.display.output import number

    def last(value: FinalMetric | None, change: float | None) -> str | None:
        if value is None:
            return None
        return number(value.last) + (f" ({change:+.3g})" if change else "")

    yield (one.key, *map(last, one.values, one.changes))
    if extremes:
        for of, name in (("min", "  minimum"), ("max", "  maximum")):
            found = [
                None
                if value is None or getattr(value, of) is None
                else f"{number(getattr(value, of))} at {getattr(value, f'{of}_step')}"
                for value in one.values
            ]
            yield (name, *found)


@app.command()
def annotate(
    job_id: Annotated[
        str | None,
        typer.Argument(metavar="JOB", help="The job.", autocompletion=job_ids, show_default=False),
    ] = None,
    tag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Add this tag.")] = None,
    untag: Annotated[list[str] | None, typer.Option(metavar="TAG", help="Remove this tag.")] = None,
    notes: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Replace the notes with this Markdown text (- for stdin)."
        ),
    ] = None,
    colour: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER",
            help="Colour of the job's curves on the web page: 0 to 19, or auto.",
        ),
    ] = None,
    where: Where = None,
    owner: Owner = "@me",
    dry_run: DryRun = False,
    expect: Expect = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Edit the tags, the notes and the colour of a job. Without options, show them."""
    from dray.cli.display.output import write_json

    search = searched(job_id, where, owner, dry_run=dry_run, expect=expect, yes=yes)
    if search is not None:
        if (notes, colour) != (None, None) or not (tag or untag):
            raise typer.BadParameter(
                "--where requires --tag or --untag, and can't be combined with --notes or --colour"
            )
        change_matching("tag", search, as_json, {"add_tags": tag or [], "remove_tags": untag or []})
        return
    assert job_id is not None
    text = sys.stdin.read() if notes == "-" else notes
    with connect() as client:
        if tag or untag or (text, colour) != (None, None):
            job_id = client.resolve(job_id)
            found = client.annotate(
                job_id, add_tags=tag, remove_tags=untag, notes=text, colour=_colour(colour)
            )
        else:
            found = client.annotations(read_job(client, job_id))
    write_json(found) if as_json else _show_annotations(found)


def _colour(text: str | None) -> int | Literal["auto"] | None:
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if text.isascii() and text.isdigit():
        return int(text)
    raise typer.BadParameter("must be a number from 0 to 19, or auto", param_hint="--colour")


def _show_annotations(found: Annotations) -> None:
    from dray.cli.display.output import cell, write, write_text

    write_text(f"tags: {', '.join(found.tags) or 'none'}")
    if found.colour is not None:
        write_text(f"colour: {found.colour}")
    if found.updated_at is not None:
        write_text(f"changed by {found.updated_by} at {cell(found.updated_at)}")
    for line in found.notes.splitlines():
        write(line)
