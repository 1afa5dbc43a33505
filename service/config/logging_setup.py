"""Logging of the service's own processes, as text or as JSON.

The output for each record includes the values of `extra` and, during a request, the request's id.
"""

from __future__ import annotations

import json
import logging
import re
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

from dray.input.names import DIRECTION

LogFormat = Literal["text", "json"]

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the current request."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_NOT_SHOWN = _STANDARD | {"color_message"}
"""Attributes that are not logged. `color_message` is uvicorn's message with terminal escape
codes."""
_CONTROL = re.compile(f"[\x00-\x1f\x7f-\x9f\u2028\u2029{DIRECTION}]")
"""C0 and C1 control characters, DEL, line separators, and characters that change the direction of
text."""


class TextFormatter(logging.Formatter):
    """Format a record as `time LEVEL logger: message`, followed by its other values. The output is
    one line unless it includes a traceback.

    Control characters are escaped, because the log may be shown in a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"]
        parts += [f"{name}={value}" for name, value in _extras(record).items()]
        lines = [" ".join(parts)]
        if record.exc_info:  # a traceback can quote text from a caller or a job
            lines += self.formatException(record.exc_info).split("\n")
        return "\n".join(map(_escaped, lines))


class JsonFormatter(logging.Formatter):
    """Format a record as one line of JSON: time, level, logger, message, and the other values."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


def _escaped(line: str) -> str:
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], line)


def _time(record: logging.LogRecord) -> str:
    at = datetime.fromtimestamp(record.created, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    # Skip attributes that begin with `_`: once imported, Ray adds such an attribute to each record.
    given = {name: value for name, value in vars(record).items() if not name.startswith("_")}
    found = {name: value for name, value in given.items() if name not in _NOT_SHOWN}
    current = request_id.get()
    if current is not None:
        found.setdefault("request_id", current)
    return found


def configure(log_format: LogFormat) -> None:
    """Log all records of level INFO and above to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    # Alembic would log several lines at each start. `service.db.migrate` logs one line for all
    # migrations instead.
    logging.getLogger("alembic").setLevel(logging.WARNING)
