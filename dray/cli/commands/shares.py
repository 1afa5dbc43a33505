"""The usage of queues and users, and the factors of a job's position in the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli.base import AsJson, app, connect

if TYPE_CHECKING:
    from dray.views import JobFactors, QueueShare, ShareReport, UserShare


@app.command()
def shares(
    queue: Annotated[
        str | None,
        typer.Option(metavar="QUEUE", help="Show only this queue and the queues under it."),
    ] = None,
    user: Annotated[str | None, typer.Option(metavar="USER", help="Show only this user.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the usage of queues and users to their shares.

    You see your own usage, or the usage of all users if you are an admin. The column UNTIL shows
    when the value in the column STANDING would end if no jobs used slots from now on."""
    from dray.cli.display.output import warn, write_json

    with connect() as client:
        report = client.shares(queue=queue, user=user)
    if as_json:
        write_json(report)
        return
    for warning in report.warnings:
        warn(f"warning: {warning.message}")
    if report.made_at is not None:
        _show(report)


def _show(report: ShareReport) -> None:
    from dray.cli.display.output import write_text
    from dray.cli.display.tables import in_tree, table

    rows = []
    by_name = {queue.name: queue for queue in report.queues}
    parents = {queue.name: queue.parent for queue in report.queues}
    for own_name, name in in_tree(parents).items():
        queue = by_name[own_name]
        rows.append((name, None, *_share(queue), _tier(queue), queue.until))
        rows += [(name, u.owner, *_share(u), u.standing, u.until) for u in queue.users]
    head = ("QUEUE", "USER", "WEIGHT", "SHARE", "DUE", "USED", "DIFFERENCE", "MARGIN", "STANDING")
    table((*head, "UNTIL"), rows, flexible=("QUEUE", "USER"), optional=("UNTIL", "MARGIN", "DUE"))
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in _counted(report).items())
    write_text(
        f"DUE, USED, DIFFERENCE and MARGIN are cluster-hours: 1 is the use of {amounts} for 1 "
        f"hour. The weight of past usage halves every {report.half_life_s / 86400:g} days."
    )


def _counted(report: ShareReport) -> dict[str, float]:
    names = ("CPU", "GPU")
    return {name: report.cluster[name] for name in names if report.cluster.get(name)}


def _share(item: QueueShare | UserShare) -> tuple[str | None, ...]:
    hours = item.due_s, item.used_s, item.difference_s, item.margin_s
    return (
        f"{item.weight:g}",
        None if item.share is None else f"{item.share:.1%}",
        *(None if seconds is None else f"{seconds / 3600:,.2f}" for seconds in hours),
    )


def _tier(queue: QueueShare) -> str | None:
    if queue.tier is None:
        return None
    standing = "ahead" if queue.tier == "ahead" else "not ahead"
    return f"{standing} (quota first)" if queue.quota else standing


def show_factors(answer: JobFactors, as_json: bool) -> None:
    """Write the factors that decide a job's position and, for each job ahead of it, the factor that
    puts that job ahead."""
    from dray.cli.display.output import write_json, write_text
    from dray.cli.display.tables import table

    if as_json:
        write_json(answer)
        return
    if answer.reason is not None:
        write_text(f"{answer.state}: {answer.reason.message} ({answer.reason.code})")
        return
    write_text(f"position {answer.position} in the queue")
    rows = ((factor.name, _value(factor.value), factor.message) for factor in answer.factors)
    table(("FACTOR", "VALUE", "MEANING"), rows, flexible=("MEANING",))
    if answer.ahead:
        nearest = "nearest jobs" if len(answer.ahead) < (answer.position or 1) - 1 else "jobs"
        write_text(f"{nearest} ahead of this job, and the factor that decides the order:")
    for each in answer.ahead:
        line = f"  {each.job.id} {each.job.name}: {each.decided_by}: {each.message}"
        write_text(line, indent="    ")


def _value(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"
