"""What each Ray worker process of a job imports before it is needed."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "dray.spec", "pandas", "sqlalchemy", "fastapi")


def test_a_worker_process_imports_nothing_that_takes_long() -> None:
    program = "import sys, ray_workers.supervisor; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()).isdisjoint(HEAVY)
