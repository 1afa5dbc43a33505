"""The command that reports the costs of users and queues."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, app, connect, moment

if TYPE_CHECKING:
    from dray.views import CostReport, Price


class CostsBy(StrEnum):
    """Group costs by user or by queue."""

    USER = "user"
    QUEUE = "queue"


@app.command()
def costs(
    by: Annotated[CostsBy, typer.Option(help="Group by user or by queue.")] = CostsBy.USER,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Start of the period, such as 7d (7 days ago) or 2026-01-31 (default: start of "
            "the month).",
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="End of the period (default: now).")
    ] = None,
    prices: Annotated[
        bool, typer.Option("--prices", help="Show the prices of resources instead of costs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Report the cost of your jobs, or of all users' jobs if you are an admin."""
    from dray.cli.display.output import warn, write_json

    with connect() as client:
        report = client.costs(
            by.value, since=moment(since, "--since"), until=moment(until, "--until")
        )
    if as_json:
        write_json(report)
        return
    _show_prices(report.prices) if prices else _show(report)
    for warning in report.warnings:
        warn(f"warning: {warning.message}")


def _show(report: CostReport) -> None:
    from dray.cli.display.output import cell, write_text
    from dray.cli.display.tables import table
    from dray.input.units import money

    write_text(f"from {cell(report.since)} to {cell(report.until)}")
    table(
        (report.by.upper(), "COST", "USEFUL", "WASTED", "UNREPORTED", "SLOT HOURS", "JOBS"),
        (
            (
                item.name,
                money(item.cost.total, item.cost.currency),
                *(f"{part:,.2f}" for part in (item.cost.useful, item.cost.wasted)),
                f"{item.cost.unreported:,.2f}" if item.cost.unreported else None,
                f"{item.slot_hours:,.2f}",
                item.num_jobs,
            )
            for item in report.items
        ),
        flexible=(report.by.upper(),),
        optional=("UNREPORTED", "SLOT HOURS", "JOBS"),
    )


def _show_prices(prices: list[Price]) -> None:
    from dray.cli.display.tables import table
    from dray.input.units import money

    table(
        ("RESOURCE", "PER HOUR", "ON NODES WITH"),
        (
            (
                "memory (GiB)" if price.resource == "memory" else price.resource,
                money(price.per_hour, price.currency),
                ", ".join(f"{key}={value}" for key, value in price.labels.items()) or "any labels",
            )
            for price in prices
        ),
        flexible=("ON NODES WITH",),
    )
