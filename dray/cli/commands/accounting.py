"""The command that lists the attempts that ran in a period."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli import filters
from dray.cli.base import AsJsonLines, app, connect, moment
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
    from datetime import datetime

    from dray.cli.display.sums import AccountingSums
    from dray.client import Client
    from dray.views import AccountingRow

_COLUMNS = (
    *("job_id", "attempt", "num_attempts", "name", "owner", "queue", "project"),
    *("array_id", "array_index", "state", "is_deleted", "reason", "exit_code"),
    *("submitted_at", "eligible_at", "began_at", "started_at", "finished_at"),
    *("waited_s", "elapsed_s", "num_workers", "slot_seconds", "cpu_seconds", "gpu_seconds"),
    *("max_runtime_s", "schedule_id", "reservation"),
)
"""The fields that are columns of the CSV. Columns for `resources`, `nodes`, `labels` and `cost`
follow."""
MAX_DAYS = 400


class SumBy(StrEnum):
    """Whether to add up the attempts by user, by queue, or by day."""

    USER = "user"
    QUEUE = "queue"
    DAY = "day"


@app.command()
def accounting(
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Start of the period, such as 7d (7 days ago) or 2026-01-31 (default: start of "
            "the month in UTC).",
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="End of the period (default: now).")
    ] = None,
    state: OnlyStates = None,
    queue: OnlyQueue = None,
    label: OnlyLabels = None,
    name: OnlyName = None,
    text: OnlyText = None,
    array: OnlyArray = None,
    owner: OnlyOwner = None,
    project: OnlyProject = None,
    schedule: OnlySchedule = None,
    reservation: OnlyReservation = None,
    per_job: Annotated[
        bool, typer.Option("--per-job", help="Add up the attempts of each job.")
    ] = False,
    sum_by: Annotated[
        SumBy | None,
        typer.Option(help="Show sums by user, by queue, or by day in this machine's time zone."),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: AsJsonLines = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="Maximum number of rows of the table.", min=1)
    ] = 1000,
) -> None:
    """List the attempts that ran in a period: yours, or all users' if you are an admin.

    For each attempt, only the times and resources that lie in the period are counted. With --csv
    and --json, all rows are printed as they arrive.
    """
    if as_csv and as_json:
        raise typer.BadParameter("--json and --csv can't be combined")
    if per_job and sum_by:
        raise typer.BadParameter("--per-job and --sum-by can't be combined")
    first, last = moment(since, "--since"), moment(until, "--until")
    with connect() as client:
        given: dict[str, Any] = filters.arguments(
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
        )
        if sum_by is None:
            given["per"] = "job" if per_job else "attempt"
            rows = client.accounting(since=first, until=last, **given)
            _print(rows, limit, as_csv=as_csv, as_json=as_json)
            return
        sums = _sums(client, sum_by, first, last, given)
    _print_sums(sums, sum_by, as_csv=as_csv, as_json=as_json)


def _print(rows: Iterator[AccountingRow], limit: int, *, as_csv: bool, as_json: bool) -> None:
    from itertools import islice

    from dray.cli.display.output import warn, write_csv_row, write_json_line

    if as_json:
        for row in rows:
            write_json_line(row)
    elif as_csv:
        write_csv_row((*_COLUMNS, "resources", "nodes", "labels", "cost", "currency"))
        for row in rows:
            write_csv_row(_cells(row))
    else:
        _tabulate(list(islice(rows, limit)))
        if next(rows, None) is not None:
            warn(f"only {limit} rows are shown; use --limit, --csv or --json to get more")


def _cells(row: AccountingRow) -> list[object]:
    import json

    cost = row.cost
    return [
        *(getattr(row, column) for column in _COLUMNS),
        json.dumps(row.resources) if row.resources else None,
        " ".join(row.nodes),
        json.dumps(row.labels, ensure_ascii=False) if row.labels else None,
        *((None, None) if cost is None else (cost.total, cost.currency)),
    ]


def _tabulate(rows: list[AccountingRow]) -> None:
    from dray.cli.display.output import duration
    from dray.cli.display.sums import AccountingSums
    from dray.cli.display.tables import shortest_prefixes, table
    from dray.input.units import money

    sums = AccountingSums()
    for row in rows:
        sums.add("total", row)
    table(
        (
            *("JOB", "ATTEMPT", "NAME", "OWNER", "QUEUE", "STATE", "REASON", "STARTED", "ENDED"),
            *("WAITED", "ELAPSED", "WORKERS", "SLOT HOURS", "GPU HOURS", "COST"),
        ),
        [
            (
                *(row.job_id, row.attempt, row.name, row.owner, row.queue, row.state, row.reason),
                *(row.started_at, row.finished_at),
                None if row.waited_s is None else duration(row.waited_s),
                duration(row.elapsed_s),
                row.num_workers,
                _hours(row.slot_seconds),
                _hours(row.gpu_seconds),
                None if row.cost is None else money(row.cost.total, row.cost.currency),
            )
            for row in rows
        ],
        flexible=("NAME", "REASON"),
        optional=(
            *("COST", "WORKERS", "REASON", "QUEUE", "GPU HOURS", "ENDED", "WAITED", "OWNER"),
            *("STARTED", "ATTEMPT"),
        ),
        shorter={"JOB": shortest_prefixes},
    )
    _print_sums(sums, None, as_csv=False, as_json=False)


def _hours(seconds: float) -> str | None:
    return f"{seconds / 3600:,.2f}" if seconds else None


def _sums(
    client: Client,
    by: SumBy,
    since: datetime | None,
    until: datetime | None,
    given: dict[str, Any],
) -> AccountingSums:
    from dray.cli.display.sums import AccountingSums

    sums = AccountingSums()
    if by is SumBy.DAY:
        for day, begin, end in _days(since, until):
            for row in client.accounting(since=begin, until=end, **given):
                sums.add(day, row)
    else:
        for row in client.accounting(since=since, until=until, **given):
            sums.add(row.owner if by is SumBy.USER else row.queue, row)
    return sums


def _days(
    since: datetime | None, until: datetime | None
) -> Iterator[tuple[str, datetime, datetime]]:
    """Yield (date, begin, end) of each day of the period, in this machine's time zone. The first
    and the last day can be incomplete."""
    from datetime import UTC, datetime, time, timedelta

    now = datetime.now(UTC)
    end = until or now
    begin = since or now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    if end - begin > timedelta(days=MAX_DAYS):
        raise typer.BadParameter(
            f"the period has more than {MAX_DAYS} days: use a later --since", param_hint="--sum-by"
        )
    while begin < end:
        today = begin.astimezone().date()
        tomorrow = datetime.combine(today + timedelta(days=1), time()).astimezone()
        yield f"{today}", begin, min(tomorrow, end)
        begin = tomorrow


def _print_sums(sums: AccountingSums, by: SumBy | None, *, as_csv: bool, as_json: bool) -> None:
    from dray.cli.display.output import write_csv_row, write_json_line
    from dray.cli.display.tables import table
    from dray.input.units import money

    found = sorted(sums.sums.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    names = ("slot_seconds", "cpu_seconds", "gpu_seconds", "num_jobs", "num_attempts")
    if as_csv or as_json:
        rows = [
            {
                "name": name,
                **{each: getattr(one, each) for each in names},
                "cost": None if currency is None else one.cost,
                "currency": currency,
            }
            for (name, currency), one in found
        ]
        if as_csv:
            write_csv_row(("name", *names, "cost", "currency"))
        for row in rows:
            write_csv_row(list(row.values())) if as_csv else write_json_line(row)
        return
    table(
        (
            *("" if by is None else by.upper(), "COST", "SLOT HOURS", "CPU HOURS", "GPU HOURS"),
            *("JOBS", "ATTEMPTS"),
        ),
        [
            (
                name,
                None if currency is None else money(one.cost, currency),
                *(_hours(each) for each in (one.slot_seconds, one.cpu_seconds, one.gpu_seconds)),
                *(one.num_jobs, one.num_attempts),
            )
            for (name, currency), one in found
        ],
        flexible=() if by is None else (by.upper(),),
    )
