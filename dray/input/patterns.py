"""Users' regular expressions, which are matched against arbitrary lines of output."""

from __future__ import annotations

from typing import Any, Final

MAX_PATTERN_CHARS: Final = 500
MAX_PATTERN_BYTES: Final = 1 << 20
"""Maximum memory of one compiled pattern."""


def compile_pattern(pattern: str) -> Any:
    """Compile the pattern with RE2, whose search time is linear in the length of the line for every
    pattern. Raises ValueError if the pattern is invalid, and ImportError if RE2 is not
    installed."""
    import re2  # installed only on servers and nodes

    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PATTERN_BYTES
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ValueError(f"is not a valid RE2 regular expression: {text}") from None
