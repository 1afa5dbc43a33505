"""Run one command line, and turn errors into a sentence and an exit code."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys

import typer

from dray.cli import commands, exits
from dray.cli.base import WrongUsage, app
from dray.cli.display import terminal
from dray.cli.exits import Exit

for _module in pkgutil.iter_modules(commands.__path__, f"{commands.__name__}."):
    importlib.import_module(_module.name)  # registers its commands


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    from dray.cli.display.output import ReaderGone, flush, warn
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
    except (ValueError, OSError) as error:  # an invalid id or state; a full disk
        warn(f"error: {error}")
        return Exit.USAGE
    except KeyboardInterrupt:
        warn("\ninterrupted")
        return Exit.INTERRUPTED
    return code


def _run(arguments: list[str]) -> int:
    """Run one command. Usage errors are printed in dray's own format, because typer would break
    lines inside words."""
    from dray.cli.display.output import warn

    try:
        code = app(args=arguments, prog_name="dray", standalone_mode=False)
    except WrongUsage as error:
        if error.ctx is not None:
            warn(error.ctx.get_usage())
            warn(f"Try '{error.ctx.command_path} --help' for help.\n")
        warn(f"Error: {error.format_message()}")
        return Exit.USAGE
    except typer.Abort:
        warn("nothing was changed")
        return Exit.INTERRUPTED
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else Exit.USAGE
    return code if isinstance(code, int) else Exit.OK


def _silence_stdout() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's final flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
