"""The capabilities of the terminal, and removal of characters that could control it."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
import unicodedata

from dray.input.names import DIRECTION

_SGR = r"\x1b\[[0-9;:]*m"
"""Escape sequences for colours and text styles. No other escape sequences are kept, because they
could affect more than one line."""
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: cursor, colours, modes (ECMA-48, 5.4)
    r"|\x1b[PX^_\]].*?(?:\x07|\x1b\\|$)"  # strings: titles, clipboard, hyperlinks
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROL = re.compile(f"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029{DIRECTION}]")
"""C0 except the tab, DEL, C1, line separators, and characters that change the direction of text."""
_PARTS = re.compile(f"({_SGR})")

BOLD, RED, GREEN, BLUE, MAGENTA, CYAN = 1, 31, 32, 34, 35, 36
CURVES = (CYAN, MAGENTA, GREEN, RED, BLUE)
"""Colours that are readable on both light and dark backgrounds."""


def prepare() -> None:
    """Make the standard streams escape unencodable characters instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def has_colours() -> bool:
    """Whether the output is a terminal and colours are not disabled (see no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def has_unicode() -> bool:
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    try:
        "┤⣿".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def width() -> int:
    """Return the width of the terminal in columns, at least 20. Without a terminal, use the
    variable COLUMNS, or 80."""
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def display_width(text: str) -> int:
    """Return the width of a string in columns. East Asian characters and emoji are two columns
    wide, and combining marks have no width."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    """Wrap `text` into lines of at most `columns`, only between words, so that ids and paths can be
    copied. All lines but the first begin with `indent`."""
    if display_width(text) <= columns:
        return [text]
    margin = text[: len(text) - len(text.lstrip())]
    lines = [margin]
    for gap, word in re.findall(r"(\s*)(\S+)", text[len(margin) :]):
        joined = f"{lines[-1]}{gap}{word}"
        if lines[-1].strip() and display_width(joined) > columns:
            lines.append(f"{margin}{indent}{word}")
        else:
            lines[-1] = joined
    return lines


def styled(text: str, code: int | None) -> str:
    """Return `text` in a colour or in bold (ECMA-48, 8.3.117), or unchanged if `code` is None."""
    return text if code is None else f"\x1b[{code}m{text}\x1b[0m"


def clean(text: str, *, colours: bool = False) -> str:
    """Return `text` on one line, without characters that move the cursor, rename the window or
    change the direction of text. With `colours`, colours are kept, and reset at the end."""
    if text.isprintable():
        return text
    if not colours:
        return _CONTROL.sub(_harmless, _SEQUENCE.sub("", text))
    parts = _PARTS.split(text)
    kept = [
        part if number % 2 else _CONTROL.sub(_harmless, _SEQUENCE.sub("", part))
        for number, part in enumerate(parts)
    ]
    return "".join(kept) + ("\x1b[0m" if len(parts) > 1 else "")


def _harmless(control: re.Match[str]) -> str:
    """Return the replacement for a control character: a space for a line break, an escape such as
    `\\u202e` for a character that changes the direction of text, otherwise nothing."""
    character = control[0]
    if character in "\n\r\u2028\u2029":
        return " "
    return ascii(character)[1:-1] if character > "\x9f" else ""
