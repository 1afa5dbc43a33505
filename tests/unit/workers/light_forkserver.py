"""The forkserver with nothing preloaded, whose ranks run the Python text in their task.

Run it as `python -m tests.unit.workers.light_forkserver SOCKET`: like the real one, without torch.

No process can survive SIGKILL, so one is simulated: as long as the file `haunted` next to the
socket contains the pid of a rank, GHOST appears among the processes that this rank has started.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from pathlib import Path

from ray_workers.node.forkserver import server as forkserver
from ray_workers.shared.contracts import RankTask
from ray_workers.shared.processes.procfs import Session, find_members

GHOST = (1 << 22) + 1
"""A pid above the largest pid of Linux."""
STUCK_S, PATIENCE_S = 3.0, 30.0
"""How soon to give up a process that can't be ended, and how late one that can."""


def run(task: RankTask) -> int:
    exec(task.spec["code"], {"__name__": "__main__"})
    return 0


def stand_in(name: str, **contents: object) -> None:
    module = types.ModuleType(f"ray_workers.training.{name}")
    module.__dict__.update(contents)
    sys.modules[module.__name__] = module


def find(sessions: Sequence[Session]) -> dict[str, list[int]]:
    found = find_members(sessions)
    haunted = Path(sys.argv[1]).with_name("haunted")
    try:
        pid = haunted.read_text()
    except FileNotFoundError:
        pid = ""
    forkserver.STUCK_S = STUCK_S if pid else PATIENCE_S
    for session in sessions:
        if str(session.pid) == pid:
            found[session.mark].append(GHOST)
    return found


if __name__ == "__main__":
    stand_in("preload", preload=lambda: None)
    stand_in("process.rank_main", main=run)
    forkserver.main(sys.argv[1], find)
