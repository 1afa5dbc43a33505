"""Commands that show how much a metric depends on each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli import filters
from dray.cli.base import AsJson, app, connect, moment
from dray.cli.choosing import read_job
from dray.cli.commands.sweeps import SweepId
from dray.cli.commands.sweeps import group as sweeps
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
    from dray.views import Importance

IncludeStopped = Annotated[
    bool,
    typer.Option(
        "--include-stopped",
        help="Also count trials that were stopped early, with the value that they had reached.",
    ),
]


@sweeps.command("importance")
def sweep_importance(
    sweep_id: SweepId,
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC",
            help="A metric other than the sweep's, such as val/loss or best:val/loss.",
        ),
    ] = None,
    include_stopped: IncludeStopped = False,
    as_json: AsJson = False,
) -> None:
    """Show how much the metric depends on each parameter, estimated from the trials that succeeded.

    At least 20 trials are needed.
    """
    with connect() as client:
        found = client.sweep_importance(
            read_job(client, sweep_id, arrays=True),
            metric=metric,
            include_stopped=include_stopped,
        )
    _show(found, as_json)


@app.command("importance")
def importance(
    metric: Annotated[
        str,
        typer.Argument(
            metavar="METRIC", help="A metric, such as val/loss or best:val/loss; cost; or duration."
        ),
    ],
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SEARCH", help="Only jobs that match a search, such as 'val/loss < 0.1'."
        ),
    ] = None,
    state: OnlyStates = None,
    queue: OnlyQueue = None,
    label: OnlyLabels = None,
    name: OnlyName = None,
    text: OnlyText = None,
    array: OnlyArray = None,
    schedule: OnlySchedule = None,
    reservation: OnlyReservation = None,
    owner: OnlyOwner = None,
    project: OnlyProject = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only jobs submitted since this time.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only jobs submitted before this time.")
    ] = None,
    include_stopped: IncludeStopped = False,
    as_json: AsJson = False,
) -> None:
    """Show how much a metric depends on each field in which the jobs' documents differ.

    The importance is estimated from the jobs that succeeded; at least 20 are needed.
    """
    with connect() as client:
        found = client.importance(
            metric,
            include_stopped=include_stopped,
            created_after=moment(since, "--since"),
            created_before=moment(until, "--until"),
            where=where,
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
        )
    _show(found, as_json)


def _show(found: Importance, as_json: bool) -> None:
    from dray.cli.display.output import number, write_json, write_text
    from dray.cli.display.tables import table

    if as_json:
        write_json(found)
        return
    left_out = ", ".join(
        f"{count} {why.replace('_', ' ')}" for why, count in found.left_out.items()
    )
    sampled = f" of {found.num_sampled_from}" if found.num_sampled_from > found.num_runs else ""
    about = f"{found.metric} of {found.num_runs}{sampled} runs"
    write_text(f"{about}; left out: {left_out}" if left_out else about)
    if found.reason is not None:
        write_text(f"no importances: {found.reason.message}")
        return
    assert found.explained is not None
    write_text(f"the forest explains {found.explained:.0%} of the variance of other runs")
    table(
        ("PARAMETER", "IMPORTANCE", "90% INTERVAL", "VALUES", "SAME AS"),
        [
            (
                each.name,
                number(each.importance),
                f"{number(each.low)} to {number(each.high)}",
                each.num_values,
                ", ".join(each.same_as) or None,
            )
            for each in found.parameters
        ],
        flexible=("PARAMETER", "SAME AS"),
        optional=("SAME AS",),
    )
