"""The command itself: its options, its exit codes, and helpers that commands share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

import dray
from dray.cli import exits
from dray.cli.completion import job_ids

if TYPE_CHECKING:
    from datetime import datetime

    from dray._http.transport import Retry
    from dray.client import Client
import math
from collections.abc import Callable

import typer

from dray.input import units

ORDER = (
    *("init", "submit", "watch", "wait", "ls", "get", "explain", "metrics", "logs", "events"),
    "tensorboard",
    *("attempts", "checkpoints", "artifacts", "download", "code", "export", "cancel", "delete"),
    *("compare", "annotate", "experiment"),
    *("sweep", "plan", "schema", "cluster", "queue", "costs", "hold", "release", "move"),
    *("priority", "preempt", "drill", "hangs", "webhook", "federate"),
)
"""The order of commands in the help. Commands that are not named here come last."""


class InOrder(typer.core.TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=lambda name: (*ORDER, name).index(name))


app = typer.Typer(
    name="dray",
    cls=InOrder,
    help="Submit training jobs to a dray server, and read back metrics, logs and the model.",
    epilog=exits.HELP,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# typer reads these annotations at run time, so the lazily imported names stay out of them.
JobId = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job's id, the beginning of its id, its name, ARRAY/INDEX, or @last.",
        autocompletion=job_ids,
    ),
]
JobIds = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB",
        help="Jobs: ids, beginnings of ids, names, or @last.",
        autocompletion=job_ids,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object on each line.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job is over.")]
Rank = Annotated[int | None, typer.Option(help="Only this rank.", min=0)]
OnlyAttempt = Annotated[int | None, typer.Option("--attempt", help="Only this attempt.", min=1)]

WrongUsage: Any = typer.BadParameter.__base__
"""Typer's exception for usage errors; older versions of typer take the class from click."""

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
    """Options of every command. The token is read from DRAY_TOKEN only, since other users can
    see a command line."""
    global _url
    _url = url


def _travel_light() -> None:
    """Skip slow imports that no command needs.

    httpx imports a command line of its own, with rich and pygments (40 ms), unless that import
    fails. pydantic searches all installed packages for plugins (20 ms).
    """
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def server_url() -> str:
    """Address of the server that commands talk to."""
    from dray._http.transport import DEFAULT_URL

    return (_url or os.environ.get("DRAY_URL") or DEFAULT_URL).rstrip("/")


@contextmanager
def connect(retry: Retry | None = None) -> Iterator[Client]:
    """Open a client. retry: rule for repeating failed calls; None for the client's own rule."""
    _travel_light()
    from dray.client import Client

    with Client(_url, retry=retry) as client:
        yield client


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Print `message` on Ctrl-C, which ends the command and not the job."""
    from dray.cli.display.output import warn

    try:
        yield
    except KeyboardInterrupt:
        warn(f"\n{message}")
        raise typer.Exit(exits.Exit.INTERRUPTED) from None


class Failures:
    """Collects failures while jobs are handled one by one: each is printed, and the loop goes
    on."""

    def __init__(self) -> None:
        self._code = exits.Exit.OK

    @contextmanager
    def noted(self) -> Iterator[None]:
        from dray.cli.display.output import warn
        from dray.errors import DrayError

        try:
            yield
        except DrayError as error:
            if exits.exit_code(error) is exits.Exit.NO_SERVER:
                raise  # the other jobs would wait for the same server
            warn(exits.sentence(error))
            self._code = self._code or exits.exit_code(error)

    def end(self) -> None:
        """Exit with the code of the first failure, if there was one."""
        if self._code:
            raise typer.Exit(self._code)


def moment(text: str | None, option: str) -> datetime | None:
    """Parse a time ago (`90s`, `2h`, `3d`), or a time in ISO 8601, which is in this machine's time
    zone unless it names another."""
    import re
    from datetime import UTC, datetime, timedelta

    if text is None:
        return None
    ago = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    if ago:
        unit = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}[ago[2]]
        return datetime.now(UTC) - timedelta(seconds=int(ago[1]) * unit)
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time: write 90s, 2h, 3d, 2026-01-31 or 2026-01-31T12:00:00Z",
            param_hint=option,
        ) from None


def seconds(text: str) -> float:
    """`90`, `1.5`, `2h`, `1h30m`."""
    return _read(text, units.seconds)


def num_bytes(text: str) -> int:
    """`1000000`, `8GiB`."""
    return int(_read(text, units.num_bytes))


def _read(text: str, with_unit: Callable[[str], int]) -> float:
    try:
        number = float(text)
    except ValueError:
        try:
            return with_unit(text)
        except ValueError as error:
            raise typer.BadParameter(f"{text!r} {error}") from None
    if not math.isfinite(number) or number < 0:
        raise typer.BadParameter(f"{text!r} must be a number of at least 0")
    return number
