"""Describes the error that ended a rank in one sentence: its type, its message, and the line in the
user's code, with advice about missing modules. Does not import torch."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ray_workers.training.core.error_chain import chain_of

MAX_CHARS = 2000
MAX_TEXT_CHARS = 800
"""Maximum length of the message of one error; the traceback contains the full message."""

_CODE_ROOT = Path(__file__).resolve().parents[3]
_NOT_THE_USERS = tuple(
    str(path) + os.sep
    for path in (
        _CODE_ROOT / "ray_workers",
        _CODE_ROOT / "dray",
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
# torch's DataLoader and torch.multiprocessing include another process's traceback in the message.
_ELSEWHERE = re.compile(r"(?:Caught \S+ in|-- )\s*(.*?process \d+)", re.IGNORECASE)
_TRACEBACK = "Traceback (most recent call last):"
_LINE_OF_FILE = re.compile(r'^\s*File "(.+?)", line (\d+)', re.MULTILINE)
_REMOTE = ("RemoteTraceback", "_RemoteTraceback")
"""Causes that contain only the traceback of a pool process, as text."""


def reason_of(error: BaseException, masked: Callable[[str], str] = str) -> str:
    """Return `TypeName: message (file, line n)`, followed by the original error, if any.

    The messages of dray's own errors are complete sentences, and are returned unchanged. masked:
    removes secrets from a string, and must be called before the string is truncated.
    """
    if is_ours(error):
        return masked(_text_of(error))[:MAX_CHARS] or type(error).__name__
    chain = list(chain_of(error))
    remote = next((e for e in chain if type(e).__name__ in _REMOTE), None)
    words = [_sentence(each, remote, masked) for each in chain if each is not remote]
    reason = words[0] if len(words) == 1 else f"{words[0]}; caused by {words[-1]}"
    return reason[:MAX_CHARS]


def traceback_of(error: BaseException) -> str:
    """Return the error's traceback as Python prints it."""
    return "".join(traceback.format_exception(type(error), error, traceback_from_script(error)))


def traceback_from_script(error: BaseException) -> TracebackType | None:
    """Return the error's traceback. If a script raised the error, the traceback starts in the
    script, without the frames of dray and runpy that called it."""
    whole = error.__traceback__
    first, in_runpy = whole, False
    while first is not None:
        is_runpy = first.tb_frame.f_globals.get("__name__") == "runpy"
        if in_runpy and not is_runpy:
            break
        in_runpy = in_runpy or is_runpy
        first = first.tb_next
    return first or whole


def is_ours(error: BaseException) -> bool:
    """Whether the error is defined by dray itself."""
    return type(error).__module__.split(".")[0] in ("ray_workers", "dray")


def _sentence(
    error: BaseException, remote: BaseException | None, masked: Callable[[str], str]
) -> str:
    text, where = _text_of(error), ""
    location = _location(error)
    if remote is not None:
        location = _location_in(_text_of(remote)) or location
    if _TRACEBACK in text:
        found = _ELSEWHERE.search(text)
        where = f"in {found.group(1)}" if found else ""
        location = _location_in(text) or location
        words = _last_words(text)
    elif isinstance(error, SystemExit):
        words = f"SystemExit: {_exit_words(error)}"
    else:
        name = type(error).__qualname__
        text = error.msg if isinstance(error, SyntaxError) else text
        text = text or (linecache.getline(*location).strip() if location else "")
        words = f"{name}: {text}" if text else name
    if location is not None:
        where += f"{', ' if where else ''}{_short(location[0])}, line {location[1]}"
    words = " ".join(masked(words).split())[:MAX_TEXT_CHARS]
    return f"{words} ({where})" if where else words


def _exit_words(error: SystemExit) -> str:
    if isinstance(error.code, int):
        return f"the training code exited with code {error.code}"
    return _text_of(error)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's class can define __str__
        return ""


def _last_words(text: str) -> str:
    """Return the error of the last traceback in a string: the lines after the traceback's stack."""
    lines = text.rstrip().splitlines()
    indented = [number for number, line in enumerate(lines) if line.startswith("  ")]
    return "\n".join(lines[indented[-1] + 1 :] if indented else lines[-1:])


def _location(error: BaseException) -> tuple[str, int] | None:
    """Return the innermost line of the user's code in the error's traceback."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return error.filename, error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    users = [(f.filename, f.lineno or 0) for f in frames if _is_users(f.filename)]
    return users[-1] if users else None


def _location_in(text: str) -> tuple[str, int] | None:
    found = [(path, int(line)) for path, line in _LINE_OF_FILE.findall(text) if _is_users(path)]
    return found[-1] if found else None


def _is_users(path: str) -> bool:
    if path.startswith("<") or _INSTALLED.search(path):
        return False
    return not str(Path(path).absolute()).startswith(_NOT_THE_USERS)


def _short(path: str) -> str:
    """Return the path as the user would write it: relative to the script's folder or the current
    directory."""
    for folder in (Path(sys.argv[0]).parent, Path.cwd()):
        for base in (folder.absolute(), folder.resolve()):
            if Path(path).is_relative_to(base):
                return str(Path(path).relative_to(base))
    return path


_PYTHONS_MESSAGE = "No module named"


def advised(reason: str, error: BaseException, *, has_code: bool, max_chars: int) -> str:
    """Return the reason why a job ended, with advice if the error, or the error from which it was
    raised, is a `ModuleNotFoundError` raised by Python itself.

    has_code: whether the job has uploaded code.
    """
    advice = _advice(error, has_code=has_code)
    return reason if advice is None else f"{reason[: max_chars - len(advice) - 2]}. {advice}"


def _advice(error: BaseException, *, has_code: bool) -> str | None:
    missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    if not isinstance(missing, ModuleNotFoundError) or not missing.name:
        return None
    if not str(missing).startswith(_PYTHONS_MESSAGE):
        return None
    if has_code:
        upload = (
            "one of your files was not uploaded: `dray submit --dry-run` lists the uploaded files"
        )
    else:
        upload = (
            "if the module is in one of your files, upload its folder: `dray submit --code FOLDER`"
        )
    parent = missing.name.rpartition(".")[0]
    if parent in sys.modules:
        return f"{upload[0].upper()}{upload[1:]}" if _is_here(parent) else None
    package = missing.name.partition(".")[0][:100]
    return (
        f"If {package} is a package, add it to environment.python_packages or to the file passed "
        f"to --requirements; {upload}"
    )


def _is_here(module: str) -> bool:
    """Whether a package is in the job's directory, instead of being installed."""
    return any(
        Path(location).is_relative_to(Path.cwd())
        for location in getattr(sys.modules[module], "__path__", ())
    )
