"""The seeds of random cases: the same in every `make test`, new ones in every `make soak`.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1` repeats a single case.
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
"""Variable with the path of a file that gets one line per case tried, for `tests/soak_hours.py`."""
T = TypeVar("T")

# The worker processes of pytest-xdist inherit the first seed.
os.environ.setdefault("DRAY_FIRST_SEED", str(secrets.randbelow(10**9) if FRESH_SEEDS else 0))


def drawn(few: int) -> range:
    """Return DRAY_SEEDS seeds, or `few` if the variable is not set."""
    first = int(os.environ["DRAY_FIRST_SEED"])
    return range(first, first + int(os.environ.get("DRAY_SEEDS", few)))


def noted(seeds: Iterable[T]) -> Iterator[T]:
    """Iterate over the seeds. A seed counts as tried when the next one is requested."""
    file = os.environ.get(CASES_VARIABLE)
    for seed in seeds:
        yield seed
        if file is not None:
            with Path(file).open("a") as cases:
                cases.write(f"{seed}\n")


def commit() -> str:
    """The commit of the working tree, followed by `+` if files have changed since."""
    named = _git("rev-parse", "--short", "HEAD")
    return named + "+" * bool(_git("status", "--porcelain")) if named else "unknown"


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], capture_output=True, text=True).stdout.strip()


def header(cases: str, tried: range) -> str:
    """Return a log line with the seeds and the commit."""
    seeds_tried = f"seeds {tried.start} to {tried.stop - 1} (DRAY_FIRST_SEED, DRAY_SEEDS)"
    return f"{cases}: {seeds_tried}, commit {commit()}"
