"""The forkserver with nothing preloaded, whose ranks run the Python text in their task.

Run as `python -m tests.unit.workers.light_forkserver SOCKET`: like the real one, without torch.
"""

from __future__ import annotations

import sys
import types

from ray_workers import forkserver
from ray_workers.contracts import RankTask


def run(task: RankTask) -> int:
    exec(task.spec["code"], {"__name__": "__main__"})
    return 0


def stand_in(name: str, **contents: object) -> None:
    module = types.ModuleType(f"ray_workers.training.{name}")
    module.__dict__.update(contents)
    sys.modules[module.__name__] = module


if __name__ == "__main__":
    stand_in("preload", preload=lambda: None)
    stand_in("entry", main=run)
    forkserver.main(sys.argv[1])
