"""Commands to invite, list and revoke clients of federated jobs, and to join a job as a client."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dray.cli.base import AsJson, JobId, app, connect, interruptible
from dray.cli.choosing import read_job

group = typer.Typer(
    name="federate", help="Invite clients from outside the cluster, or take part as a client."
)
app.add_typer(group)

PATIENCE_S = 24 * 3600.0
"""Seconds for which a client keeps trying to reach the server."""


@group.command("invite")
def invite_clients(
    job_id: JobId,
    clients: Annotated[
        int, typer.Option(help="Number of clients, at most 1,000 per call.", min=1, max=1000)
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Create tokens for clients of a federated job, and print a line with the number and token of
    each client.

    Tokens are printed only once. A token allows its client only to take part in this job.
    """
    from dray.cli.display.output import write, write_json

    with connect() as client:
        found = client.invite_clients(client.resolve(job_id), clients)
    if as_json:
        write_json(found)
        return
    for one in found:
        write(f"{one.client} {one.token}")


@group.command("clients")
def list_clients(job_id: JobId, as_json: AsJson = False) -> None:
    """List the invited clients, and show the latest round."""
    from dray.cli.display.output import age, time_left, write_json, write_text
    from dray.cli.display.tables import listing

    with connect() as client:
        page = client.federated_clients(read_job(client, job_id))
    if as_json:
        write_json(page)
        return
    if page.round is not None:
        state = "open" if page.is_open else "over"
        write_text(f"round {page.round} is {state}: {page.num_sent} updates, quorum {page.quorum}")
        if page.missing and page.closes_at is not None:
            missing = ", ".join(map(str, page.missing))
            write_text(f"no update yet, {time_left(page.closes_at)}: {missing}")
    listing(
        page.items,
        as_json,
        ("CLIENT", "INVITED BY", "INVITED", "JOINED", "UPDATES", "LAST UPDATE"),
        lambda one: (
            *(one.client, one.invited_by, age(one.created_at)),
            None if one.joined_at is None else age(one.joined_at),
            one.num_sent,
            None if one.sent_at is None else age(one.sent_at),
        ),
        optional=("INVITED BY", "INVITED"),
    )


@group.command("revoke")
def revoke_client(
    job_id: JobId,
    client_number: Annotated[
        int, typer.Argument(metavar="CLIENT", help="The client's number.", min=0)
    ],
    as_json: AsJson = False,
) -> None:
    """Revoke the token of a client, so that it can't take part in further rounds."""
    import json

    from dray.cli.display.output import write

    with connect() as client:
        found = client.resolve(job_id)
        client.revoke_client(found, client_number)
    revoked = {"revoked": client_number, "job": found}
    write(json.dumps(revoked) if as_json else f"client {client_number} of {found} revoked")


@group.command("join")
def join_job(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="The job's full id.")],
    data: Annotated[
        Path,
        typer.Option(help="A table, or a folder with a subfolder of images for each class."),
    ],
    as_json: AsJson = False,
) -> None:
    """Take part in the rounds of a federated job. The data never leaves this machine.

    DRAY_TOKEN must be the token that `dray federate invite` printed. Install the packages with `pip
    install 'dray[client]'`. You can stop a client and start it again at any time.
    """
    from dray._http.transport import Retry
    from dray.cli.display.output import warn, write, write_text
    from dray.cli.exits import Exit

    try:
        with (
            connect(Retry(patience_s=PATIENCE_S)) as client,
            interruptible(
                f"{job_id} continues without this client; to take part again, restart the client"
            ),
        ):
            state = client.join(job_id, data, on_round=None if as_json else write_text)
    except ImportError as error:  # the message names the package and how to install it
        warn(f"error: {error}")
        raise typer.Exit(Exit.USAGE) from None
    write(f'{{"state": "{state}"}}' if as_json else f"{job_id} is {state}")
    if state != "SUCCEEDED":
        raise typer.Exit(Exit.JOB_ENDED_BADLY)
