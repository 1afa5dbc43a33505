"""Change the jobs that a command line names, or all jobs that a search matches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli.base import Failures, connect
from dray.cli.choosing import Choice, confirm, find_all, is_array, label_pairs, state_names

if TYPE_CHECKING:
    from dray.client import Client
    from dray.views import ArrayChange, BulkChange, Job

Where = Annotated[
    str | None,
    typer.Option(
        metavar="SEARCH", help="Select the jobs that match a search, such as 'val/loss > 2'."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="With --where, only show what would happen.")
]
Expect = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --where, change jobs only if exactly N match.", min=0),
]

CANDIDATES = {
    "hold": ("QUEUED",),
    "release": ("QUEUED",),
    "move": ("QUEUED",),
    "preempt": ("STARTING", "RUNNING", "RECOVERING"),
    "priority": ("QUEUED", "STARTING", "RUNNING", "RECOVERING"),
}
"""The states to which an action applies."""


@dataclass(frozen=True)
class Search:
    """The options of a command that changes all jobs that a search matches."""

    where: str
    owner: str
    dry_run: bool
    expect: int | None
    yes: bool
    states: Sequence[str] = ()
    labels: Mapping[str, str] | None = None


def searched(
    jobs: Sequence[str] | None,
    where: str | None,
    owner: str,
    *,
    dry_run: bool,
    expect: int | None,
    yes: bool,
) -> Search | None:
    """Return the search; None if jobs are named instead. Raises BadParameter if the command line
    contains both a search and names of jobs, or neither."""
    if (where is None) == (not jobs):
        raise typer.BadParameter("specify jobs, or select jobs with --where")
    if where is None:
        for is_given, option in ((dry_run, "--dry-run"), (expect is not None, "--expect")):
            if is_given:
                raise typer.BadParameter("requires --where", param_hint=option)
        return None
    return Search(where, owner, dry_run, expect, yes)


def change_named(
    references: Sequence[str],
    as_json: bool,
    of_job: Callable[[Client, str], Job],
    of_array: Callable[[Client, str], ArrayChange],
    line: Callable[[Job], str],
    *,
    is_reversed: bool = False,
) -> None:
    """Change each job and array, and print a line for it. All references are resolved before
    anything is changed. With `is_reversed`, the last job is changed first."""
    from dray.cli.display.output import write_json_line, write_text

    failures = Failures()
    with connect() as client:
        found = [one for each in references for one in find_all(client, each, failures)]
        for job_id in dict.fromkeys(found[::-1] if is_reversed else found):
            with failures.noted():
                if is_array(job_id):
                    change = of_array(client, job_id)
                    write_json_line(change) if as_json else write_text(array_line(change))
                else:
                    job = of_job(client, job_id)
                    write_json_line(job) if as_json else write_text(line(job))
    failures.end()


def array_line(change: ArrayChange) -> str:
    """Return a line such as `array-1: 4 jobs changed, 6 skipped (4 job_finished, 2 ...)`."""
    parts = [_jobs(change.changed) + " changed"]
    if change.unchanged:
        parts.append(f"{change.unchanged} already as requested")
    if change.skipped:
        reasons = ", ".join(f"{number} {code}" for code, number in change.skipped.items())
        parts.append(f"{sum(change.skipped.values())} skipped ({reasons})")
    return f"{change.array.id}: {', '.join(parts)}"


def change_searched(
    action: str,
    choice: Choice,
    default_states: Sequence[str],
    where: str | None,
    dry_run: bool,
    expect: int | None,
    yes: bool,
    as_json: bool,
) -> bool:
    """Apply an action to all jobs that match `where`, and that have the labels and states of
    `choice`. Returns False if `where` is None."""
    if where is not None and choice.everything:
        raise typer.BadParameter("can't be combined with --where", param_hint="--all")
    jobs = choice.references
    if where is None and not jobs and choice.is_by_rule:
        jobs = ("",)  # jobs are selected by other options
    search = searched(jobs, where, choice.owner, dry_run=dry_run, expect=expect, yes=yes)
    if search is None:
        return False
    states = state_names(choice.states) or default_states
    search = replace(search, states=states, labels=label_pairs(choice.labels))
    change_matching(action, search, as_json)
    return True


def change_matching(
    action: str, search: Search, as_json: bool, parameters: Mapping[str, Any] | None = None
) -> None:
    """Apply an action to all jobs that the search matches, after showing their number and asking
    for confirmation. Exits with 3 if a job could not be changed."""
    from dray.cli.display.output import warn, write_json
    from dray.cli.exits import Exit
    from dray.errors import NotConfirmed

    selected: dict[str, Any] = {
        "where": search.where,
        "state": search.states or CANDIDATES.get(action, ()),
        "label": search.labels,
        # Without an owner, the server counts the jobs of other users, but changes none of them.
        "owner": None if search.owner == "@me" else search.owner,
        "parameters": parameters,
    }
    most = search.expect
    with connect() as client:
        # A dry run takes as long as the action, so it is skipped if its result is not needed.
        if search.dry_run or search.expect is not None or not search.yes:
            tried = client.bulk(action, **selected, dry_run=True)
            number = tried.matched - tried.other_owners
            if search.dry_run:
                write_json(tried) if as_json else _report(tried, action)
                return
            if search.expect is not None and number != search.expect:
                warn(f"error: {_jobs(number)} match, but --expect is {search.expect}")
                raise typer.Exit(Exit.REFUSED)
            most = number if _confirm(tried, action, search) else most
        try:
            done = client.bulk(action, **selected, max_jobs=most)
        except NotConfirmed as error:
            warn(f"error: {error.detail}")
            if most is None:
                warn("hint: if you want to change all of these jobs, give their number as --expect")
            raise typer.Exit(Exit.REFUSED) from None
    write_json(done) if as_json else _report(done, action)
    if done.refused:
        raise typer.Exit(Exit.REFUSED)


def _confirm(tried: BulkChange, action: str, search: Search) -> bool:
    """Ask for confirmation unless --yes is given, and return whether the user was asked. Exits if
    the user declines."""
    number = tried.matched - tried.other_owners
    if search.yes or not number:
        return False
    confirm(f"{action.capitalize()} {_jobs(number)}?", _lines(tried, action), yes=False)
    return True


def _report(change: BulkChange, action: str) -> None:
    from dray.cli.display.output import write_text

    for line in _lines(change, action):
        write_text(line)


def _lines(change: BulkChange, action: str) -> list[str]:
    verb = "would be changed" if change.dry_run else "changed"
    lines = [
        f"{action}: {_jobs(change.changed)} {verb}",
        *(f"  {job_id}" for job_id in change.jobs),
    ]
    if change.changed > len(change.jobs):
        lines.append(f"  and {change.changed - len(change.jobs)} more")
    if change.unchanged:
        lines.append(f"{_jobs(change.unchanged)} already as requested")
    for problem in change.problems:
        lines.append(f"{_jobs(problem.count)} refused ({problem.code}): {problem.message}")
    if change.other_owners:
        lines.append(f"{_jobs(change.other_owners)} of other users left unchanged")
    return lines


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"
