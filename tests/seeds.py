"""The seeds of drawn cases: the same in each `make test`, new ones in `make soak`.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1` draws one case again.
"""

from __future__ import annotations

import os
import secrets
import subprocess

from tests.marks import FRESH_SEEDS


def seeds(few: int) -> range:
    """As many as DRAY_SEEDS names, `few` where it is not set."""
    first = os.environ.get("DRAY_FIRST_SEED")
    if first is None:
        first = os.environ["DRAY_FIRST_SEED"] = str(secrets.randbelow(10**9) if FRESH_SEEDS else 0)
    return range(int(first), int(first) + int(os.environ.get("DRAY_SEEDS", few)))


def named(cases: str, drawn: range) -> str:
    """A line for the log of a run."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    commit = found.stdout.strip() or "unknown"
    return f"{cases}: seeds {drawn.start} to {drawn.stop - 1}, commit {commit}"
