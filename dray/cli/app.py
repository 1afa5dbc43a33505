"""Runs one command line and turns what went wrong into a sentence and an exit code."""

from __future__ import annotations

from dray.cli import exits
from dray.cli import jobs as _jobs  # noqa: F401  registers its commands
from dray.cli import reading as _reading  # noqa: F401  registers its commands
from dray.cli.base import app
from dray.cli.exits import Exit


def run(arguments: list[str]) -> int:
    """Run one command; its exit code."""
    from dray.cli.output import warn
    from dray.errors import DrayError

    try:
        app(args=arguments, prog_name="dray")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else Exit.USAGE
    except DrayError as error:
        warn(exits.sentence(error))
        return exits.exit_code(error)
    except ValueError as error:  # an id or a state that can't be one
        warn(f"error: {error}")
        return Exit.USAGE
    except BrokenPipeError:  # `dray logs ... | head`
        _silence_stdout()
    except OSError as error:
        warn(f"error: {error}")
        return Exit.USAGE
    return Exit.OK


def _silence_stdout() -> None:
    """Let the interpreter's last flush go nowhere instead of into the closed pipe."""
    import os
    import sys

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
