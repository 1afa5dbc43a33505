"""The advice that follows a module that is not there. Needs no torch."""

from __future__ import annotations

import sys
from pathlib import Path

_SAID_BY_PYTHON = "No module named"


def advised(reason: str, error: BaseException, *, has_code: bool, max_chars: int) -> str:
    """The reason for which a job ended, with what to do if the error, or the one that it was raised
    from, is a `ModuleNotFoundError` of Python's own.

    has_code: whether the job brings uploaded code.
    """
    advice = _advice(error, has_code=has_code)
    return reason if advice is None else f"{reason[: max_chars - len(advice) - 2]}. {advice}"


def _advice(error: BaseException, *, has_code: bool) -> str | None:
    missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    if not isinstance(missing, ModuleNotFoundError) or not missing.name:
        return None
    if not str(missing).startswith(_SAID_BY_PYTHON):
        return None
    if has_code:
        upload = "a file of yours was not uploaded: `dray submit --dry-run` lists what is"
    else:
        upload = "a file of yours is uploaded with its folder: `dray submit --code FOLDER`"
    parent = missing.name.rpartition(".")[0]
    if parent in sys.modules:
        return f"{upload[0].upper()}{upload[1:]}" if _is_here(parent) else None
    package = missing.name.partition(".")[0][:100]
    return (
        f"If {package} is a package, add it to environment.python_packages or to the file of "
        f"--requirements; {upload}"
    )


def _is_here(module: str) -> bool:
    """Whether a package lies in the job's directory, and is not installed."""
    return any(
        Path(place).is_relative_to(Path.cwd())
        for place in getattr(sys.modules[module], "__path__", ())
    )
