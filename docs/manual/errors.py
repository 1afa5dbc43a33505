"""Generates the reference of problem codes from the classes in `dray.errors`."""

from __future__ import annotations

import inspect

from dray.errors import CODES
from manual.tables import table

_HEAD = """# Error codes

Every error of the API is a problem document (RFC 9457) with a stable `code`. The SDK raises the
class in the third column; see [`dray.errors`](sdk.md#errors) for the base classes. The command line
prints the message with the invalid field and a hint.

"""


def page() -> str:
    rows = [
        (f"`{code}`", str(kind.http_status), f"`{kind.__name__}`", inspect.getdoc(kind) or "")
        for code, kind in sorted(CODES.items())
    ]
    return _HEAD + table(("code", "status", "class", "meaning"), rows)
