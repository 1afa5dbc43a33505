"""Commands about the scheduler's decisions and the errors of its forecasts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, connect
from dray.cli.commands.queues import group

if TYPE_CHECKING:
    from dray.views import DecisionOnJob, ForecastError, ReplayedDecision


@group.command("decisions")
def show_decisions(
    number: Annotated[
        int | None,
        typer.Argument(min=1, metavar="[NUMBER]", help="Show this round, and replay it."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Number of rounds to list.")] = 20,
    before: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Only rounds before this one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the rounds in which the scheduler changed something, or replay one of them."""
    from dray.cli.display.output import write_json
    from dray.cli.display.tables import listing

    with connect() as client:
        if number is not None:
            replayed = client.decision(number)
            write_json(replayed) if as_json else _show(replayed)
            return
        found = client.decisions(before=before, limit=limit)
    listing(
        found,
        as_json,
        ("NUMBER", "TIME", "WAITED", "RAN", "STARTED", "GREW", "SHRANK", "LEFT", "FAILED"),
        lambda each: (
            *(each.number, each.made_at, each.num_waiting, each.num_running),
            *(_names(each.started), _names(each.grew), _names(each.shrank)),
            *(_names(each.left), _names(each.failed)),
        ),
        flexible=("STARTED", "LEFT"),
        optional=("FAILED", "GREW", "SHRANK", "LEFT", "STARTED"),
    )


def _names(jobs: list[str]) -> str | None:
    return ", ".join(jobs) or None


def _show(found: ReplayedDecision) -> None:
    from dray.cli.display.output import cell, write, write_text
    from dray.cli.display.tables import table

    write_text(f"round {found.number} at {cell(found.made_at)}: {_waited(found.num_waiting)}")
    write("")
    table(
        ("JOB", "DECISION", "PRIORITY", "LEFT", "WAITED", "USER", "QUEUE", "WHY"),
        map(_row, found.decided),
        flexible=("WHY",),
        optional=("QUEUE", "USER"),
    )
    write("")
    if found.is_same:
        write_text("The current policy makes the same decisions.")
        return
    write_text("The current policy would decide differently:")
    table(
        ("JOB", "DECISION", "PRIORITY", "LEFT", "WAITED", "USER", "QUEUE", "WHY"),
        map(_row, found.replayed),
        flexible=("WHY",),
    )


def _waited(number: int) -> str:
    return "1 job waited" if number == 1 else f"{number} jobs waited"


def _row(each: DecisionOnJob) -> tuple[object, ...]:
    from dray.cli.display.output import duration

    left = None if each.left_s is None else duration(each.left_s)
    waited = None if each.waited_s is None else duration(max(0.0, each.waited_s))
    why = None if each.reason is None else each.reason.message
    if each.node_ids and each.num_workers:
        workers = "1 worker" if each.num_workers == 1 else f"{each.num_workers} workers"
        why = why or f"{workers} on {', '.join(each.node_ids)}"
    return (
        *(each.job_id, each.decision, each.priority, left, waited),
        *(each.owner, each.queue, why),
    )


@group.command("forecasts")
def show_forecasts(as_json: AsJson = False) -> None:
    """Show how accurate the forecasts of starts and ends were in the last 7 days."""
    from dray.cli.display.output import write_json
    from dray.cli.display.tables import table

    with connect() as client:
        found = client.forecast_errors()
    if as_json:
        write_json(found)
        return
    table(
        ("FORECASTS OF", "NUMBER", "MEDIAN ERROR", "9 OF 10 BELOW", "AHEAD BY"),
        (_error("starts", found.starts), _error("ends", found.ends)),
    )


def _error(of: str, error: ForecastError) -> tuple[object, ...]:
    from dray.cli.display.output import duration

    seconds = (error.median_s, error.p90_s, error.median_ahead_s)
    return (of, error.count, *(None if each is None else duration(each) for each in seconds))
