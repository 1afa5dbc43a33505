"""Runs one command line and turns what went wrong into a sentence and an exit code."""

from __future__ import annotations

import os
import sys

from dray.cli import exits, terminal
from dray.cli import faults as _faults  # noqa: F401  registers its commands
from dray.cli import jobs as _jobs  # noqa: F401  registers its commands
from dray.cli import plan as _plan  # noqa: F401  registers its commands
from dray.cli import reading as _reading  # noqa: F401  registers its commands
from dray.cli import results as _results  # noqa: F401  registers its commands
from dray.cli.base import app
from dray.cli.exits import Exit


def run(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    from dray.cli.output import ReaderGone, flush, warn
    from dray.errors import DrayError

    terminal.prepare()
    try:
        code = _run(arguments)
        flush()
    except DrayError as error:
        warn(exits.sentence(error))
        return exits.exit_code(error)
    except ReaderGone:
        _silence_stdout()
        return Exit.OK
    except (ValueError, OSError) as error:  # an id or a state that can't be one; a full disk
        warn(f"error: {error}")
        return Exit.USAGE
    except KeyboardInterrupt:
        warn("\ninterrupted")
        return Exit.INTERRUPTED
    return code


def _run(arguments: list[str]) -> int:
    try:
        app(args=arguments, prog_name="dray")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else Exit.USAGE
    return Exit.OK


def _silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere instead of into the closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
