"""The top-level command, its options, and helpers shared by the subcommands."""

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
    "samples",
    "media",
    "tensorboard",
    *("attempts", "checkpoints", "artifacts", "download", "code", "export", "cancel", "delete"),
    *("compare", "diff", "lineage", "importance", "annotate", "experiment", "views", "report"),
    *(
        "sweep",
        "model",
        "plan",
        "preview",
        "schema",
        "cluster",
        "queue",
        "reservation",
        "costs",
        "accounting",
        "usage",
    ),
    *("shares", "hold", "release", "move"),
    *("change", "priority", "max-running", "preempt", "drill", "hangs", "schedule"),
    *("webhook", "federate"),
)
"""The order of commands in the help. Commands that are not listed come last."""


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

# typer evaluates these annotations at run time, so they must not use lazily imported names.
JobId = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="A job's id, a prefix of the id, its name, ARRAY/INDEX, or @last.",
        autocompletion=job_ids,
    ),
]
JobIds = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB",
        help="Jobs: ids, prefixes of ids, names, ARRAY/INDICES, or @last.",
        autocompletion=job_ids,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Keep printing until the job has ended.")
]
Rank = Annotated[int | None, typer.Option(help="Only this rank.", min=0)]
OnlyAttempt = Annotated[int | None, typer.Option("--attempt", help="Only this attempt.", min=1)]

WrongUsage: Any = typer.BadParameter.__base__
"""Typer's exception for usage errors. Older versions of typer use click's class."""

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
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options that every command has. The token is read from DRAY_TOKEN instead of an
    option, since other users can see the command line."""
    global _url
    _url = url


def _travel_light() -> None:
    """Skip slow imports that no command needs.

    httpx imports its own command line, with rich and pygments (40 ms), unless that import fails.
    pydantic searches all installed packages for plugins (20 ms).
    """
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def server_url() -> str:
    """The address of the server that commands connect to."""
    from dray._http.transport import DEFAULT_URL

    return (_url or os.environ.get("DRAY_URL") or DEFAULT_URL).rstrip("/")


@contextmanager
def connect(retry: Retry | None = None) -> Iterator[Client]:
    """Open a client. `retry` is the rule for retrying failed calls; None means the client's
    default."""
    _travel_light()
    from dray.client import Client

    with Client(_url, retry=retry) as client:
        yield client


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Print `message` and exit on Ctrl-C, which ends the command but not the job."""
    from dray.cli.display.output import warn

    try:
        yield
    except KeyboardInterrupt:
        warn(f"\n{message}")
        raise typer.Exit(exits.Exit.INTERRUPTED) from None


class Failures:
    """Print the failures of a loop over jobs as they occur, without stopping the loop."""

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
                raise  # requests for the other jobs would fail in the same way
            warn(exits.sentence(error))
            self._code = self._code or exits.exit_code(error)

    def end(self) -> None:
        """Exit with the code of the first failure, if any."""
        if self._code:
            raise typer.Exit(self._code)


def moment(text: str | None, option: str) -> datetime | None:
    """Parse an age (`90s`, `2h`, `3d`) or an ISO 8601 time. A time without a zone is in this
    machine's time zone."""
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
            f"{text!r} is not a time: write 90s, 2h, 3d, 2026-01-31 or 2026-01-31T12:00:00Z",
            param_hint=option,
        ) from None


def future(text: str | None, option: str) -> str | None:
    """Return the time that an option specifies, in the format of RFC 3339. Times without an offset
    are local times of this machine."""
    from datetime import datetime

    from dray.input.times import SystemZone, from_words

    if text is None:
        return None
    try:
        found = from_words(text, datetime.now().astimezone(), SystemZone(), "this time zone")
    except OverflowError:
        raise typer.BadParameter("is too far in the future", param_hint=option) from None
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
    return found.replace(microsecond=0).isoformat()


def seconds(text: str) -> float:
    """Parse `90`, `1.5`, `2h` or `1h30m` as seconds."""
    return _read(text, units.seconds)


def num_bytes(text: str) -> int:
    """Parse `1000000` or `8GiB` as bytes."""
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
        raise typer.BadParameter(f"{text!r} must be a finite, non-negative number")
    return number
