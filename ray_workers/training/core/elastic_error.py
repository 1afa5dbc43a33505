"""The file in which torch's `@record` stores the error that ended a rank.

torchrun reads this file to report why a rank failed. If the error itself ends the rank, dray
reports more details than the file contains. If the script catches the error and calls `sys.exit`,
only the file contains it.
"""

from __future__ import annotations

import json
from pathlib import Path

from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.error_chain import PEER_IS_GONE

MAX_FILE_BYTES = 1 << 20


def path_of(task: RankTask) -> Path:
    """Return the path of this process's file, next to its heartbeat page."""
    prefix = task.page_prefix or f"{task.temp_dir}/r{task.rank}.{task.incarnation}"
    return Path(f"{prefix}.error.json")


def recorded(path: Path) -> tuple[str, str] | None:
    """Return (message, traceback) of the error in the file; None if the file does not exist or
    contains no error. The user's code could have written arbitrary content to the file."""
    try:
        with path.open("rb") as file:
            body = json.loads(file.read(MAX_FILE_BYTES))["message"]
        if isinstance(body, str):
            return body, ""
        message = str(body["message"]).strip()
        return (
            (message, str(body.get("extraInfo", {}).get("py_callstack", ""))) if message else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_secondary_failure(message: str) -> bool:
    """Whether the message comes from a rank that lost a peer."""
    return PEER_IS_GONE.search(message) is not None
