"""Select the jobs for a command, by name or by label and state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli import completion
from dray.cli.completion import job_ids

if TYPE_CHECKING:
    from dray.cli.base import Failures
    from dray.client import Client

References = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="JOB",
        help="Jobs and arrays: ids, prefixes of ids, names, ARRAY/INDICES such as "
        "ARRAY/1,3,5-9 or ARRAY/0-98:2, or @last.",
        autocompletion=job_ids,
        show_default=False,
    ),
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="Select jobs with this label."),
]
States = Annotated[
    list[str] | None,
    typer.Option("--state", help="Select jobs in this state.", autocompletion=completion.states),
]
Everything = Annotated[bool, typer.Option("--all", help="Select all jobs.")]
Owner = Annotated[
    str, typer.Option(help="If no jobs are named, select only this owner's jobs; @me means you.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask for confirmation.")]

LIVE = ("QUEUED", "STARTING", "RUNNING", "RECOVERING", "CANCELLING")
FINISHED = ("SUCCEEDED", "FAILED", "CANCELLED")
MOST_SHOWN = 20
"""Maximum number of jobs to list when asking for confirmation."""


@dataclass(frozen=True)
class Choice:
    """The jobs that the command line selects."""

    references: Sequence[str]
    labels: Sequence[str]
    states: Sequence[str]
    """States to select; by default the states to which the command applies."""
    everything: bool
    owner: str

    @property
    def is_by_rule(self) -> bool:
        return bool(self.labels or self.states or self.everything)

    def check(self) -> None:
        """Raise BadParameter unless jobs are either named or selected by options."""
        if bool(self.references) == self.is_by_rule:
            raise typer.BadParameter(
                "specify jobs, or select jobs with --label, --state or --all"
                + (", not both" if self.references else "")
            )


def choose(
    client: Client,
    choice: Choice,
    failures: Failures,
    *,
    default_states: Sequence[str],
    is_reading: bool = False,
) -> dict[str, str]:
    """Return the ids of the selected jobs and arrays, each with its display name. If a reference
    matches no job, print a failure and continue with the next reference. A name that several jobs
    share is also an error. With `is_reading`, such a name selects the newest of these jobs
    instead."""
    from dray.cli.display.output import warn

    if not choice.is_by_rule:
        found = {}
        for reference in choice.references:
            for job_id in find_all(client, reference, failures, is_reading=is_reading):
                found[job_id] = job_id if reference in job_id else f"{job_id} {reference}"
        return found
    jobs = client.jobs(
        state=state_names(choice.states) or default_states,
        label=label_pairs(choice.labels),
        owner=choice.owner,
        page_size=500,
    )
    found = {job.id: f"{job.id} {job.state} {job.name}" for job in jobs}
    if not found:
        warn("no matching jobs")
    return found


def find_all(
    client: Client, reference: str, failures: Failures, *, is_reading: bool = False
) -> list[str]:
    """Return the ids of the jobs that `reference` identifies, or the id of an array. If no job or
    array matches, print a failure. If a list of indices contains an index that does not exist,
    raise JobNotFound, so that no job of the command is changed."""
    from dray._http.references import index_list

    if index_list(reference) is not None:
        return client.resolve_all(reference)
    with failures.noted():
        return [(read_job if is_reading else type(client).resolve)(client, reference, arrays=True)]
    return []


def read_job(client: Client, reference: str, *, arrays: bool = False) -> str:
    """Return the id of the job to show. If several jobs have the name, return the newest, and print
    its id to standard error. With `arrays`, the reference may also name an array.

    A command that changes a job calls `client.resolve`, which raises AmbiguousJob instead.
    """
    from dray.cli.display.output import cell, warn
    from dray.errors import AmbiguousJob

    try:
        return client.resolve(reference, arrays=arrays)
    except AmbiguousJob as error:
        newest = error.candidates[0]
        names = (reference, reference.rpartition("/")[0])
        in_array = not arrays and newest.array_id is not None and newest.name == reference
        if in_array or any(job.name not in names for job in error.candidates):
            raise  # the user could mean any job of the array, or any id with this prefix
        number = f"more than {len(error.candidates)}" if error.more else len(error.candidates)
        taken = error.ids[0]
        warn(
            f"{number} jobs are named {newest.name}: using the newest, {taken}, created "
            f"{cell(newest.created_at)}"
        )
        return taken


def read_jobs(client: Client, given: Sequence[str]) -> list[str]:
    """Return the ids of the jobs to show. Lists of indices, such as `ARRAY/1-3`, are expanded."""
    from dray._http.references import index_list

    found = [
        job_id
        for reference in given
        for job_id in (
            client.resolve_all(reference)
            if index_list(reference) is not None
            else [read_job(client, reference)]
        )
    ]
    return list(dict.fromkeys(found))


def is_array(one: str) -> bool:
    """Whether `one` is the id of an array."""
    return one.startswith("array-")


def ask(what: str, jobs: Sequence[str], *, yes: bool) -> None:
    """Ask for confirmation of a change of jobs; see `confirm`."""
    if not jobs:
        return
    number = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    lines = [f"  {job}" for job in jobs[:MOST_SHOWN]]
    if len(jobs) > MOST_SHOWN:
        lines.append(f"  and {len(jobs) - MOST_SHOWN} more")
    confirm(what.format(jobs=number), lines, yes=yes)


def confirm(question: str, lines: Sequence[str] = (), *, yes: bool) -> None:
    """Print the lines and ask for confirmation, and exit if the user declines. Without a terminal,
    require --yes."""
    import sys

    from dray.cli.display.output import warn
    from dray.cli.exits import Exit

    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise typer.BadParameter(
            f"{question} Without a terminal, confirm with --yes", param_hint="--yes"
        )
    for line in lines:
        warn(line)
    if not typer.confirm(question, err=True):
        warn("nothing was changed")
        raise typer.Exit(Exit.INTERRUPTED)


def state_names(names: Sequence[str] | None) -> list[str]:
    wanted = [name.upper() for name in names or ()]
    unknown = [name for name in wanted if name not in completion.STATES]
    if unknown:
        known = ", ".join(completion.STATES)
        raise typer.BadParameter(f"{unknown[0]} is not one of {known}", param_hint="--state")
    return wanted


def label_pairs(texts: Sequence[str] | None) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts or ()]
    if any(not (key and equals) for key, equals, _ in pairs):
        raise typer.BadParameter("write a label as KEY=VALUE", param_hint="--label")
    return {key: value for key, _, value in pairs}
