"""What the service's processes write about themselves: lines for people, or JSON for programs.

A record made while a request is answered carries its id, and what `extra` gave it.
"""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that is being answered."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """`LEVEL logger: message`, then what else is known; one line, unless there is a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        parts = [f"{record.levelname} {record.name}: {message}"]
        parts += [f"{name}={value}" for name, value in _extras(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object in each line: time, level, logger, message, and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        fields: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    # Ray marks every record of a process that imports it, by a name that begins with `_`.
    given = {name: value for name, value in vars(record).items() if not name.startswith("_")}
    found = {name: value for name, value in given.items() if name not in _STANDARD}
    current = request_id.get()
    if current is not None:
        found.setdefault("request_id", current)
    return found


def configure(log_format: LogFormat) -> None:
    """Send everything from INFO on to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
