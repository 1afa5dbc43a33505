"""The command itself: its options, its exit codes, and what all of its commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

import dray
from dray.cli import exits

if TYPE_CHECKING:
    from dray.client import Client

app = typer.Typer(
    name="dray",
    help="Submit training jobs to a dray server, and read back metrics, logs and the model.",
    epilog=exits.HELP,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# typer reads these annotations at run time, so the lazily imported names stay out of them.
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")]
Rank = Annotated[int | None, typer.Option(help="Only this rank.", min=0)]
OnlyAttempt = Annotated[int | None, typer.Option("--attempt", help="Only this attempt.", min=1)]

_url: str | None = None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dray {dray.__version__}")
        raise typer.Exit


@app.callback()
def options(
    url: Annotated[
        str | None, typer.Option(help="Address of the server (default: DRAY_URL).")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print and exit.")
    ] = False,
) -> None:
    """What every command shares. The token is read from DRAY_TOKEN only, as others can see
    a command line."""
    global _url
    _url = url


@contextmanager
def connect() -> Iterator[Client]:
    from dray.client import Client

    with Client(_url) as client:
        yield client
