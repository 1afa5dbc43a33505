"""Generates the settings reference from the fields of `Settings` and their docstrings."""

from __future__ import annotations

from typing import Any

from manual.tables import table
from service.config.settings import Settings

_HEAD = """# Settings

The service reads its settings from environment variables, then from the file `.env` in the current
folder. With the defaults, everything runs on this machine. If a setting is invalid, the service
doesn't start, and the error names the setting.

"""
_TAIL = """
Clients read two variables: `DRAY_URL`, the URL of the server, and `DRAY_TOKEN`. If `DRAY_TOKEN` is
unset and a server on the same machine requires a token, clients send the token in `DRAY_HOME`.
"""


def page() -> str:
    rows = [
        (f"`DRAY_{name.upper()}`", _default(field.default), field.description or "")
        for name, field in Settings.model_fields.items()
    ]
    return _HEAD + table(("setting", "default", "meaning"), rows) + _TAIL


def _default(value: Any) -> str:
    if value is None or value in ("", ()):
        return "none"
    if type(value) is int and value >= 1 << 20:
        return f"{value >> 20} MiB"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
