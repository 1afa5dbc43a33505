"""The command that reports the usage of the cluster over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, app, connect, moment

if TYPE_CHECKING:
    from dray.views import IdleGpuReport, UsageReport, UsageSeries


class UsagePer(StrEnum):
    """The length of the periods."""

    HOUR = "hour"
    DAY = "day"


class UsageBy(StrEnum):
    """Whether to show users or queues."""

    USER = "user"
    QUEUE = "queue"


_COLUMNS = (
    *("slot_hours", "cpu_hours", "gpu_hours", "measured_gpu_hours", "idle_gpu_hours"),
    *("num_started", "num_succeeded", "num_failed", "num_cancelled"),
)
_CAPACITY = ("measured_s", "cpu_hours", "gpu_hours")


@app.command()
def usage(
    per: Annotated[UsagePer, typer.Option(help="Length of the periods.")] = UsagePer.DAY,
    by: Annotated[
        UsageBy | None, typer.Option(help="Show each user or each queue instead of the total.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Start of the report, such as 30d (30 days ago) or 2026-01-31 (default: 7 days "
            "ago, or 24 hours ago with --per hour).",
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="End of the report (default: now).")
    ] = None,
    time_zone: Annotated[
        str,
        typer.Option(
            metavar="ZONE",
            help="Time zone in which hours and days begin, such as Europe/Berlin.",
        ),
    ] = "UTC",
    waits: Annotated[
        bool, typer.Option("--waits", help="Show how long jobs waited, by reason.")
    ] = False,
    idle: Annotated[
        bool, typer.Option("--idle", help="Show GPUs that running jobs do not use now.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Report what jobs used in each hour or day, its cost, and why jobs waited.

    With --by user, you see your own usage and the sum of all other users, or all users if you are
    an admin.
    """
    from dray.cli.display.output import write_json

    if as_csv and as_json:
        raise typer.BadParameter("--json and --csv can't be combined")
    if waits and idle:
        raise typer.BadParameter("--waits and --idle can't be combined")
    with connect() as client:
        if idle:
            found = client.idle_gpus()
            write_json(found) if as_json else _show_idle(found, as_csv=as_csv)
            return
        report = client.usage(
            per=per.value,
            by=None if by is None else by.value,
            since=moment(since, "--since"),
            until=moment(until, "--until"),
            time_zone=time_zone,
        )
    if as_json:
        write_json(report)
    elif waits:
        _show_waits(report, as_csv=as_csv)
    elif as_csv:
        _write_csv(report)
    else:
        _show(report)


def _periods(report: UsageReport) -> list[str]:
    """Return the beginning of each period in the report's time zone."""
    from dray.input.times import zone_named

    zone = zone_named(report.time_zone)
    form = "%Y-%m-%d" if report.per == "day" else "%Y-%m-%d %H:%M"
    return [start.astimezone(zone).strftime(form) for start in report.starts]


def _rows(report: UsageReport) -> Iterator[tuple[int, str, UsageSeries]]:
    """Yield (index of the period, name, series) of the amounts to show. Users and queues are left
    out of periods in which they used nothing."""
    for index in range(len(report.starts)):
        if report.by is None:
            yield index, "", report.total
        for series in report.series:
            is_used = any(getattr(series, name)[index] for name in _COLUMNS)
            if is_used or any(cost.amounts[index] for cost in series.costs):
                yield index, series.name or "(others)", series


def _show(report: UsageReport) -> None:
    from dray.cli.display.tables import table
    from dray.input.units import money

    periods = _periods(report)
    by = () if report.by is None else (report.by.upper(),)
    table(
        (
            *(report.per.upper(), *by, "GPU HOURS", "OF", "IDLE GPU HOURS", "CPU HOURS", "OF CPUS"),
            *("SLOT HOURS", "COST", "STARTED", "SUCCEEDED", "FAILED", "CANCELLED"),
        ),
        [
            (
                *(periods[index], *((name,) if by else ())),
                *(_hours(series.gpu_hours[index]), _hours(report.capacity.gpu_hours[index])),
                _hours(series.idle_gpu_hours[index]),
                *(_hours(series.cpu_hours[index]), _hours(report.capacity.cpu_hours[index])),
                _hours(series.slot_hours[index]),
                ", ".join(
                    money(cost.amounts[index], cost.currency)
                    for cost in series.costs
                    if cost.amounts[index]
                ),
                *(
                    getattr(series, name)[index] or None
                    for name in ("num_started", "num_succeeded", "num_failed", "num_cancelled")
                ),
            )
            for index, name, series in _rows(report)
        ],
        flexible=by,
        optional=("SLOT HOURS", "CANCELLED", "OF CPUS", "CPU HOURS", "IDLE GPU HOURS", "STARTED"),
    )


def _hours(hours: float) -> str | None:
    return f"{hours:,.2f}" if hours else None


def _write_csv(report: UsageReport) -> None:
    from dray.cli.display.output import write_csv_row

    currencies = sorted({c.currency for s in (report.total, *report.series) for c in s.costs})
    capacity = [f"capacity_{name}" for name in _CAPACITY]
    costs = [f"cost_{currency}" for currency in currencies]
    write_csv_row(("start", "name", *_COLUMNS, *costs, *capacity))
    for index, name, series in _rows(report):
        spent = {cost.currency: cost.amounts[index] for cost in series.costs}
        write_csv_row(
            (
                *(report.starts[index], name),
                *(getattr(series, column)[index] for column in _COLUMNS),
                *(spent.get(currency, 0.0) for currency in currencies),
                *(getattr(report.capacity, column)[index] for column in _CAPACITY),
            )
        )


def _show_waits(report: UsageReport, *, as_csv: bool) -> None:
    heads = ("start" if as_csv else report.per.upper(), *(wait.code for wait in report.waits))
    starts: Sequence[object] = report.starts if as_csv else _periods(report)
    rows: list[tuple[object, ...]] = []
    for index, start in enumerate(starts):
        hours = [wait.job_hours[index] for wait in report.waits]
        rows.append((start, *(hours if as_csv else map(_hours, hours))))
    _write(heads, rows, as_csv=as_csv)


def _show_idle(report: IdleGpuReport, *, as_csv: bool) -> None:
    from dray.cli.display.output import cell, warn

    heads = ("job_id", "name", "owner", "queue", "num_idle", "num_measured", "ranks", "idle_since")
    shown = ("JOB", "NAME", "OWNER", "QUEUE", "IDLE GPUS", "OF", "RANKS", "IDLE SINCE")
    rows: list[tuple[object, ...]] = [
        (
            *(item.job_id, item.name, item.owner, item.queue, item.num_idle, item.num_measured),
            " ".join(map(str, item.ranks)),
            item.idle_since if as_csv else cell(item.idle_since),
        )
        for item in report.items
    ]
    _write(heads if as_csv else shown, rows, as_csv=as_csv)
    if report.unmeasured:
        names = ", ".join(item.name or item.job_id for item in report.unmeasured[:5])
        more = f" and {len(report.unmeasured) - 5} more" if len(report.unmeasured) > 5 else ""
        warn(f"the GPUs of these jobs are not measured: {names}{more}")


def _write(heads: Sequence[str], rows: list[tuple[object, ...]], *, as_csv: bool) -> None:
    from dray.cli.display.output import write_csv_row
    from dray.cli.display.tables import table

    if not as_csv:
        table(heads, rows)
        return
    write_csv_row(heads)
    for row in rows:
        write_csv_row(row)
