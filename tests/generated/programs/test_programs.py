"""Generated training scripts: compares dray's runs with torch's.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1 pytest tests/generated/programs` runs one program again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.generated.programs.checking import Checked
from tests.generated.programs.conftest import FEW, seeds
from tests.generated.programs.drawing import draw
from tests.seeds import noted
from tests.unit.training import ranks

CHUNK = 10
"""Number of programs per test, which torch runs in the same processes."""
DEADLINE_S = 60.0
"""Time limit for one run of a program, which takes 1 s on two free cores. Slower runs hang."""
LEAST_DIFFERENT = 30
"""Number of characters of an error that identify it."""


@pytest.fixture(autouse=True)
def _deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "DEADLINE_S", DEADLINE_S)


@pytest.mark.parametrize("first", range(seeds().start, seeds().stop, CHUNK))
def test_drawn_programs_train_as_by_torch_and_after_kills_to_the_same_bits(
    tmp_path: Path, first: int
) -> None:
    chunk = range(first, min(first + CHUNK, seeds().stop))
    references = under_torchrun(chunk, tmp_path) if len(chunk) > FEW else {}
    found = {}
    for seed in noted(chunk):
        error = error_of(seed, tmp_path / str(seed), references=references)
        if error is not None:
            found[seed] = smaller(seed, error, tmp_path / str(seed))
    assert not found, "\n\n".join(found.values())


def under_torchrun(chunk: range, home: Path) -> dict[int, Path]:
    """Return the states that torch's own launcher leaves, by number of ranks."""
    folders = {}
    for world_size in (2, 3):
        folders[world_size] = home / f"torchrun-{world_size}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={world_size}", "-m", "tests.generated.programs.references"]
        command += [str(folders[world_size]), str(chunk.start), str(chunk.stop)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert run.returncode == 0, run.stderr[-2000:]
    return folders


def error_of(
    seed: int,
    home: Path,
    *,
    without: frozenset[str] = frozenset(),
    references: dict[int, Path] | None = None,
) -> str | None:
    """What is wrong with the program of this seed without some features; None if nothing is."""
    checked = Checked(draw(seed, without), home, references)
    try:
        checked.check()
    except AssertionError as error:
        return f"{error} {error.__cause__ or ''}"
    return None


def smaller(seed: int, error: str, home: Path) -> str:
    """The program with the features alone without which it does not fail so, and the error."""
    without: frozenset[str] = frozenset()
    for feature in sorted(draw(seed).features):
        fewer = without | {feature}
        other = error_of(seed, home / f"without-{feature}", without=fewer)
        if other is not None and other[:LEAST_DIFFERENT] == error[:LEAST_DIFFERENT]:
            without, error = fewer, other
    program = draw(seed, without)
    return f"seed {seed}, {sorted(program.features)}\n{program.body}\n{error}"
