"""The options with which a command filters a list of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dray.cli import completion
from dray.cli.choosing import is_array, label_pairs, read_job, state_names

if TYPE_CHECKING:
    from dray.client import Client

OnlyStates = Annotated[
    list[str] | None,
    typer.Option("--state", help="Only jobs in this state.", autocompletion=completion.states),
]
OnlyQueue = Annotated[
    str | None, typer.Option("--queue", help="Only jobs in this queue, or in a queue under it.")
]
OnlyLabels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="Only jobs with this label."),
]
OnlyName = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="Only jobs with this name; * matches any text, ? matches one character.",
    ),
]
OnlyText = Annotated[
    str | None,
    typer.Option(
        "--text",
        metavar="PART",
        help="Only jobs whose name contains this text, ignoring case.",
    ),
]
OnlyOwner = Annotated[
    str | None, typer.Option("--owner", help="Only this owner's jobs; @me means you.")
]
OnlyProject = Annotated[str | None, typer.Option("--project", help="Only jobs of this project.")]
OnlySchedule = Annotated[
    str | None, typer.Option("--schedule", help="Only jobs that this schedule submitted.")
]
OnlyReservation = Annotated[
    str | None, typer.Option("--reservation", help="Only jobs that name this reservation.")
]


OnlyArray = Annotated[
    str | None,
    typer.Option("--array", metavar="ARRAY", help="Only the jobs of this array (id or name)."),
]


def array_of(client: Client, given: str | None) -> str | None:
    """Return the id, or the prefix of an id, of the array that `--array` names."""
    if given is None or is_array(given):
        return given
    found = read_job(client, given, arrays=True)
    if not is_array(found):
        raise typer.BadParameter(f"{given!r} is not an array", param_hint="--array")
    return found


def arguments(
    client: Client,
    *,
    state: Sequence[str] | None,
    queue: str | None,
    label: Sequence[str] | None,
    name: str | None,
    text: str | None,
    owner: str | None,
    project: str | None,
    array: str | None,
    schedule: str | None,
    reservation: str | None,
) -> dict[str, Any]:
    """Return the arguments for the client's methods that correspond to these options."""
    is_glob = name is not None and any(sign in name for sign in "*?")
    return {
        "state": state_names(state),
        "queue": queue,
        "label": label_pairs(label),
        "name": None if is_glob else name,
        "name_glob": name if is_glob else None,
        "text": text,
        "owner": owner,
        "project": project,
        "array": array_of(client, array),
        "schedule": schedule,
        "reservation": reservation,
    }
