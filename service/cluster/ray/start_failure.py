"""Finds the reason why Ray did not start: the last error in the logs of its processes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

LOGS = (
    *("gcs_server.err", "dashboard_agent.log", "runtime_env_agent.log", "raylet.err"),
    *("dashboard_*.log", "dashboard.err"),
)
"""Logs of Ray's processes. The log of a process comes before the logs of the processes that its
failure might end. `dashboard.log` and `monitor.log` are omitted, because the port that they may
report as being in use is not needed by any other process."""
TAIL_BYTES = 1 << 16
MAX_CHARS = 400

_PYTHON = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?:: .*)?$")
_FATAL = re.compile(r"^\[[^\]]* [CF] \d+ \d+\] (?:\(\S+\) )?\S+ *(?P<text>.*)$")
_ERROR = re.compile(r"^\[[^\]]* E \d+ \d+\] (?:\(\S+\) )?\S+ *(?P<text>.*)$")
_NOISE = re.compile(r"An unexpected system state has occurred\. .* fix it\. ?")
"""The text with which Ray prefixes each failed check."""


def reason(daemon_log: Path, temp_dir: Path) -> str | None:
    """Return the name of the program that failed and its error line; None if no log contains an
    error.

    `daemon_log` is the output of `ray start`, and `temp_dir` is Ray's temp-dir, which contains
    Ray's logs.
    """
    # The pattern omits session_latest, which is a link to the only session.
    sessions = temp_dir.glob("session_2*/logs")
    logs = [path for folder in sessions for name in LOGS for path in sorted(folder.glob(name))]
    # Search the GCS's log before the output of `ray start`: if the GCS failed, `ray start` reports
    # only that the GCS is missing.
    logs.insert(1 if logs and logs[0].name == LOGS[0] else 0, daemon_log)
    texts = {"ray start" if path == daemon_log else path.stem: _tail(path) for path in logs}
    # Look for fatal errors first, because other errors are often only consequences of a program's
    # failure.
    for patterns in ((_PYTHON, _FATAL), (_ERROR,)):
        for program, text in texts.items():
            if line := _last_match(text, patterns):
                return f"{program}: {line}"
    return None


def _last_match(log: str, patterns: Sequence[re.Pattern[str]]) -> str | None:
    for line in reversed(log.splitlines()):
        for found in filter(None, (pattern.match(line) for pattern in patterns)):
            text = found.groupdict().get("text", line)
            return _NOISE.sub("", text)[:MAX_CHARS]
    return None


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
