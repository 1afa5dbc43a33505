"""The seeds of drawn cases: the same in each `make test`, new ones in `make soak`.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1` draws one case again.
"""

from __future__ import annotations

import os
import secrets
import subprocess

from tests.marks import FRESH_SEEDS

# The processes of pytest-xdist inherit the seed of the first.
os.environ.setdefault("DRAY_FIRST_SEED", str(secrets.randbelow(10**9) if FRESH_SEEDS else 0))


def drawn(few: int) -> range:
    """As many as DRAY_SEEDS names, and `few` where it is not set."""
    first = int(os.environ["DRAY_FIRST_SEED"])
    return range(first, first + int(os.environ.get("DRAY_SEEDS", few)))


def header(cases: str, tried: range) -> str:
    """The line of a log that names the seeds and the commit."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    seeds_tried = f"seeds {tried.start} to {tried.stop - 1} (DRAY_FIRST_SEED, DRAY_SEEDS)"
    return f"{cases}: {seeds_tried}, commit {commit}"
