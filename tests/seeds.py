"""The seeds of drawn cases: the same in each `make test`, new ones in `make soak`.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1` draws one case again.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.marks import FRESH_SEEDS

CASES_VARIABLE = "DRAY_CASES_FILE"
"""Names a file that gets a line for each case that was tried, for `tests/soak_hours.py`."""
T = TypeVar("T")

# The processes of pytest-xdist inherit the seed of the first.
os.environ.setdefault("DRAY_FIRST_SEED", str(secrets.randbelow(10**9) if FRESH_SEEDS else 0))


def drawn(few: int) -> range:
    """As many as DRAY_SEEDS names, and `few` where it is not set."""
    first = int(os.environ["DRAY_FIRST_SEED"])
    return range(first, first + int(os.environ.get("DRAY_SEEDS", few)))


def noted(seeds: Iterable[T]) -> Iterator[T]:
    """The seeds, each of which has been tried when the next one is asked for."""
    file = os.environ.get(CASES_VARIABLE)
    for seed in seeds:
        yield seed
        if file is not None:
            with Path(file).open("a") as cases:
                cases.write(f"{seed}\n")


def commit() -> str:
    """The commit of the files, with `+` where they have changed since."""
    named = _git("rev-parse", "--short", "HEAD")
    return named + "+" * bool(_git("status", "--porcelain")) if named else "unknown"


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], capture_output=True, text=True).stdout.strip()


def header(cases: str, tried: range) -> str:
    """The line of a log that names the seeds and the commit."""
    seeds_tried = f"seeds {tried.start} to {tried.stop - 1} (DRAY_FIRST_SEED, DRAY_SEEDS)"
    return f"{cases}: {seeds_tried}, commit {commit()}"
