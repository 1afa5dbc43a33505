"""The file in which torch's `@record` leaves the error that ended a rank.

torchrun reads it to say why a rank failed. A rank that raises the error itself reports more than
the file has; the file has the reason of one that catches the error, and then calls `sys.exit`.
"""

from __future__ import annotations

import json
from pathlib import Path

from ray_workers.shared.contracts import RankTask
from ray_workers.training.core.error_chain import PEER_IS_GONE

MAX_FILE_BYTES = 1 << 20


def path_of(task: RankTask) -> Path:
    """The file of this process, beside its page."""
    prefix = task.page_prefix or f"{task.temp_dir}/r{task.rank}.{task.incarnation}"
    return Path(f"{prefix}.error.json")


def recorded(path: Path) -> tuple[str, str] | None:
    """(message, traceback) of the error in the file; None if there is no such file, or if it says
    nothing. The user's code may have written anything there."""
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(MAX_FILE_BYTES))["message"]
        if isinstance(said, str):
            return said, ""
        message = str(said["message"]).strip()
        return (
            (message, str(said.get("extraInfo", {}).get("py_callstack", ""))) if message else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def is_echo(message: str) -> bool:
    """Whether the words are those of a rank that lost a peer."""
    return PEER_IS_GONE.search(message) is not None
