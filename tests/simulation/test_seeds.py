"""Random storms: the promises hold, whatever happens and in whatever order.

`pytest tests/simulation --seed 17` runs a single storm and prints its trace. `DRAY_SEEDS=10000`
sets the number of seeds, `DRAY_FIRST_SEED=0` repeats the same ones.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import books, storm
from tests.simulation.conftest import TIMEOUT_S, seeds

pytestmark = [pytest.mark.usefixtures("_quiet"), pytest.mark.timeout(TIMEOUT_S)]

BATCH = 10
"""Storms per test, few enough to stay far below the timeout even on a slow machine."""
ANY_SEED = 7


def _batches() -> list[range]:
    tried = seeds()
    return [tried[begin : begin + BATCH] for begin in range(0, len(tried), BATCH)]


@pytest.mark.parametrize("batch", _batches(), ids=lambda batch: f"{batch[0]}-{batch[-1]}")
def test_every_promise_holds_in_every_storm(
    batch: range, folder: Path, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--seed", None) is not None:
        pytest.skip("--seed selects another storm")
    for seed in batch:
        storm.run(books.empty_memory(), folder, seed)


def test_the_seed_that_was_asked_for(folder: Path, request: pytest.FixtureRequest) -> None:
    seed = request.config.getoption("--seed", None)
    if seed is None:
        pytest.skip("runs a single storm: --seed N")
    print("\n".join(storm.run(books.empty_memory(), folder, seed)))


def test_a_seed_is_the_same_storm_each_time(folder: Path) -> None:
    """The same in another process with a different hash seed; otherwise failures may be
    irreproducible."""
    here = storm.run(books.empty_memory(), folder, ANY_SEED)
    assert len(here) > 50
    program = (
        "import sys; from pathlib import Path; from tests.simulation import books, storm;"
        f"print('\\n'.join(storm.run(books.empty_memory(), Path(sys.argv[1]), {ANY_SEED})))"
    )
    there = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "1"},
    )
    assert there.stdout.splitlines() == here
