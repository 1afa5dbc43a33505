"""Commands for queues."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli.base import AsJson, app, connect

if TYPE_CHECKING:
    from dray.views import Queue, QueueBound

group = typer.Typer(name="queue", help="List, show, configure and delete queues.")
app.add_typer(group)

NONE = "none"
"""The value that removes a limit, or restores the default, when given instead of a number."""
Name = Annotated[str, typer.Argument(metavar="NAME", help="The queue's name.")]


@group.command("ls")
def list_queues(
    tree: Annotated[bool, typer.Option("--tree", help="Show each queue under its parent.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the queues with their jobs, resources in use, and limits."""
    from dray.cli.display.tables import in_tree, listing

    with connect() as client:
        found = client.queues()
    shown = {queue.name: queue.name for queue in found}
    if tree:
        shown = in_tree({queue.name: queue.parent for queue in found})
        by_name = {queue.name: queue for queue in found}
        found = [by_name[name] for name in shown]
    headings = ("NAME", "WAITING", "RUNNING", "HOLDS", "LIMIT", "QUOTA", "WEIGHT")
    listing(
        found,
        as_json,
        headings,
        lambda queue: (
            *(shown[queue.name], queue.num_waiting, queue.num_running, _amounts(queue.holds)),
            _limits(queue.limit, queue.max_running, queue.max_queued),
            *(_amounts(queue.quota), queue.weight),
        ),
        flexible=("HOLDS", "LIMIT", "QUOTA"),
        optional=("QUOTA", "LIMIT", "WEIGHT"),
    )


@group.command("show")
def show_queue(name: Name, as_json: AsJson = False) -> None:
    """Show the rules of a queue, and its jobs grouped by user."""
    from dray.cli.display.output import write_json

    with connect() as client:
        queue = client.queue(name)
    write_json(queue) if as_json else _show(queue)


AMOUNT = "RESOURCE=AMOUNT"
USER_WEIGHT = "USER=WEIGHT"


def _named_option(form: str, help_: str) -> Any:
    return typer.Option(metavar=form, help=help_, show_default=False)


def _number_option(help_: str) -> Any:
    return typer.Option(metavar="N", help=help_, show_default=False)


def _duration_option(help_: str) -> Any:
    return typer.Option(metavar="DURATION", help=help_, show_default=False)


@group.command("set")
def set_queue(
    name: Name,
    parent: Annotated[
        str | None, _named_option("QUEUE", "The parent queue, whose rules also apply, or none.")
    ] = None,
    weight: Annotated[
        str | None,
        _number_option("Share of the cluster, or of the parent's share, relative to other queues."),
    ] = None,
    user_weight: Annotated[
        list[str] | None,
        _named_option(USER_WEIGHT, "A user's share of the queue, relative to other users."),
    ] = None,
    quota: Annotated[
        list[str] | None,
        _named_option(AMOUNT, "Resources guaranteed to the queue's jobs, such as GPU=8."),
    ] = None,
    borrowing_limit: Annotated[
        list[str] | None,
        _named_option(AMOUNT, "Maximum resources that the queue can use above its quota."),
    ] = None,
    lending_limit: Annotated[
        list[str] | None,
        _named_option(AMOUNT, "Maximum part of the quota that other queues can use."),
    ] = None,
    limit: Annotated[
        list[str] | None,
        _named_option(AMOUNT, "Maximum resources of the queue's running jobs, such as GPU=8."),
    ] = None,
    user_limit: Annotated[
        list[str] | None, _named_option(AMOUNT, "Maximum resources of each user's running jobs.")
    ] = None,
    max_running: Annotated[str | None, _number_option("Maximum number of running jobs.")] = None,
    max_running_per_user: Annotated[
        str | None, _number_option("Maximum number of running jobs per user.")
    ] = None,
    max_queued: Annotated[str | None, _number_option("Maximum number of waiting jobs.")] = None,
    max_queued_per_user: Annotated[
        str | None, _number_option("Maximum number of waiting jobs per user.")
    ] = None,
    max_priority: Annotated[
        str | None, _number_option("Highest priority that a job can have.")
    ] = None,
    default_max_runtime: Annotated[
        str | None, _duration_option("Running time of jobs without max_runtime_s.")
    ] = None,
    max_runtime: Annotated[
        str | None, _duration_option("Highest max_runtime_s that a job can have.")
    ] = None,
    budget: Annotated[
        str | None,
        _number_option("Maximum total cost of all jobs; no job starts once it is reached."),
    ] = None,
    monthly_budget: Annotated[
        str | None, _number_option("Maximum cost of all jobs per month.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change the rules of a queue, or create a queue; admins only.

    Rules that are not given remain unchanged. `none` instead of a number removes a limit or a
    user's weight.
    """
    from dray.cli.display.output import write_json

    rules: dict[str, Any] = {}
    if parent is not None:
        rules["parent"] = None if parent == NONE else parent
    resources = {
        "quota": quota,
        "borrowing_limit": borrowing_limit,
        "lending_limit": lending_limit,
        "limit": limit,
        "user_limit": user_limit,
    }
    for rule, parts in resources.items():
        if parts:
            rules[rule] = dict(_amount(part, f"--{rule.replace('_', '-')}") for part in parts)
    if user_weight:
        rules["user_weights"] = dict(_user_weight(part, "--user-weight") for part in user_weight)
    counts = {
        "max_running": max_running,
        "max_running_per_user": max_running_per_user,
        "max_queued": max_queued,
        "max_queued_per_user": max_queued_per_user,
        "max_priority": max_priority,
    }
    for rule, text in counts.items():
        if text is not None:
            rules[rule] = number_or_none(text, int, f"--{rule.replace('_', '-')}")
    for rule, text in (("default_max_runtime", default_max_runtime), ("max_runtime", max_runtime)):
        if text is not None:
            rules[f"{rule}_s"] = _duration(text, f"--{rule.replace('_', '-')}")
    amounts = {"weight": weight, "budget": budget, "monthly_budget": monthly_budget}
    for rule, text in amounts.items():
        if text is not None:
            rules[rule] = number_or_none(text, float, f"--{rule.replace('_', '-')}")
    with connect() as client:
        queue = client.set_queue(name, **rules)
    write_json(queue) if as_json else _show(queue)


def _amount(text: str, option: str) -> tuple[str, float | str | None]:
    name, amount = _named(text, AMOUNT, option)
    if name == "memory" and not re.fullmatch(r"[0-9.]+|none", amount):
        return name, amount  # a size with a unit, which the server parses
    return name, number_or_none(amount, float, option)


def _user_weight(text: str, option: str) -> tuple[str, float | None]:
    name, weight = _named(text, USER_WEIGHT, option)
    return name, number_or_none(weight, float, option)


def _named(text: str, form: str, option: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not value:
        raise typer.BadParameter(f"write {text!r} as {form}", param_hint=option)
    return name, value


def number_or_none(text: str, kind: Callable[[str], float], option: str) -> float | None:
    if text == NONE:
        return None
    try:
        number = kind(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    except ValueError:
        what = "whole number" if kind is int else "number"
        message = f"{text!r} is neither a {what} nor {NONE!r}"
        raise typer.BadParameter(message, param_hint=option) from None


def _duration(text: str, option: str) -> int | None:
    from dray.input.units import seconds

    try:
        return None if text == NONE else int(text) if text.isdecimal() else seconds(text)
    except ValueError as error:
        message = f"{text!r} {error}, or {NONE!r}"
        raise typer.BadParameter(message, param_hint=option) from None


@group.command("delete")
def delete_queue(name: Name, as_json: AsJson = False) -> None:
    """Delete a queue that has no unfinished jobs; admins only."""
    import json

    from dray.cli.display.output import write

    with connect() as client:
        client.delete_queue(name)
    write(json.dumps({"deleted": name}) if as_json else f"{name} deleted")


def _show(queue: Queue) -> None:
    from dray.cli.display.output import cell, write, write_text
    from dray.cli.display.tables import table

    lines: list[tuple[str, object]] = [
        ("name", queue.name),
        *_in_tree(queue),
        ("weight", queue.weight),
        *_user_weights(queue),
        ("quota", _amounts(queue.quota)),
        *_borrowing(queue),
        ("limit", _limits(queue.limit, queue.max_running, queue.max_queued)),
        (
            "each user",
            _limits(queue.user_limit, queue.max_running_per_user, queue.max_queued_per_user),
        ),
        ("priority", f"up to {queue.max_priority}"),
        *_run_times(queue),
        *_costs(queue),
        ("waiting", _waiting(queue)),
        ("running", queue.num_running),
        ("holds", _amounts(queue.holds)),
        *(("allowed", _bound(bound)) for bound in queue.allowed if queue.parent is not None),
        *(("warning", warning.message) for warning in queue.warnings),
    ]
    for name, value in lines:
        write_text(f"{name:<10} {cell(value)}", indent=" " * 11)
    if queue.users:
        write("")
        table(
            ("USER", "WEIGHT", "WAITING", "RUNNING", "HOLDS"),
            (
                (u.owner, u.weight, u.num_waiting, u.num_running, _amounts(u.holds))
                for u in queue.users
            ),
        )


def _in_tree(queue: Queue) -> list[tuple[str, object]]:
    parent = [] if queue.parent is None else [("parent", queue.parent)]
    return [*parent, *([("children", ", ".join(queue.children))] if queue.children else [])]


def _borrowing(queue: Queue) -> list[tuple[str, object]]:
    limits = (("borrows", queue.borrowing_limit), ("lends", queue.lending_limit))
    return [(name, f"at most {_all_amounts(amounts)}") for name, amounts in limits if amounts]


def _bound(bound: QueueBound) -> str:
    """Return a string such as `3 GPU more, according to the limit of lab (8 GPU)`."""
    rules = {"borrowing_limit": "quota and borrowing limit"}
    if bound.resource == "jobs":
        return (
            f"{bound.left:g} more jobs, according to max_running of {bound.queue} ({bound.most:g})"
        )
    left, most = (_all_amounts({bound.resource: each}) for each in (bound.left, bound.most))
    rule = rules.get(bound.rule, bound.rule)
    return f"{left} more, according to the {rule} of {bound.queue} ({most})"


def _user_weights(queue: Queue) -> list[tuple[str, object]]:
    """Return `ann 2, bob 0.5; other users 1`, or nothing if all users have the same weight."""
    from dray.cli.display.output import cell

    shown = ", ".join(f"{user} {cell(weight)}" for user, weight in queue.user_weights.items())
    return [("weights", f"{shown}; other users 1")] if shown else []


def _run_times(queue: Queue) -> list[tuple[str, object]]:
    """Return `2h00m by default, at most 1d00h`, or nothing if running times are not limited."""
    from dray.cli.display.output import duration

    default_s, most_s = queue.default_max_runtime_s, queue.max_runtime_s
    parts = [] if default_s is None else [f"{duration(default_s)} by default"]
    parts += [] if most_s is None else [f"at most {duration(most_s)}"]
    return [("run time", ", ".join(parts))] if parts else []


def _costs(queue: Queue) -> list[tuple[str, object]]:
    """Return the budgets and the amounts spent; nothing if slots have no prices."""
    currency = queue.currency or ""
    parts = (
        ("budget", queue.budget, queue.spent),
        ("each month", queue.monthly_budget, queue.spent_this_month),
    )
    return [
        (name, _of_budget(budget, spent, currency))
        for name, budget, spent in parts
        if budget is not None or spent is not None
    ]


def _of_budget(budget: float | None, spent: float | None, currency: str) -> str:
    from dray.input.units import money

    most = "none" if budget is None else money(budget, currency).rstrip()
    return most if spent is None else f"{most}, {money(spent, currency)} spent"


def _waiting(queue: Queue) -> str:
    held = f" ({queue.num_held} held)" if queue.num_held else ""
    return f"{queue.num_waiting}{held}"


def _limits(amounts: dict[str, float], running: int | None, queued: int | None) -> str | None:
    """Return a string such as `8 GPU, 10 running, 100 waiting`."""
    parts = [] if not amounts else [_amounts(amounts)]
    parts += [] if running is None else [f"{running} running"]
    parts += [] if queued is None else [f"{queued} waiting"]
    return ", ".join(part for part in parts if part) or None


def _amounts(amounts: dict[str, float]) -> str | None:
    """Like `_all_amounts`; None if there are no amounts."""
    return _all_amounts(amounts) or None


def _all_amounts(amounts: dict[str, float]) -> str:
    """Return a string such as `8 GPU, 64.0 GiB of memory`."""
    from dray.cli.display.output import size

    parts = [
        f"{size(round(amount))} of memory"
        if name == "memory"
        else f"{amount:g} {name.removeprefix('accelerator_type:')}"
        for name, amount in amounts.items()
    ]
    return ", ".join(parts)
