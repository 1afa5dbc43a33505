"""Recorded runs at random paths, written piece by piece in parallel: each gets its own series.

`DRAY_FIRST_SEED=17 DRAY_SEEDS=1 pytest tests/generated/loggers` draws one case again.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ray_workers.node.found_metrics.files import MetricFiles
from tests.generated.loggers.conftest import seeds
from tests.generated.loggers.record import RECORDED
from tests.generated.loggers.replay import Series, truth_of
from tests.generated.loggers.test_recorded import COUNTED, is_alike, once
from tests.seeds import noted

BLOCKS = 4
"""Number of tests that share the seeds."""
RUNS = {
    "lightning-csv": [f"logs/fold{fold}/version_0/metrics.csv" for fold in range(3)],
    "lightning-tensorboard": [f"logs/fold{fold}/version_0" for fold in range(3)],
    "accelerate": [f"runs/seed{seed}/regression" for seed in (1, 2)],
    "tensorboard": [f"runs/seed-{run}" for run in "ab"],
    "timm": [f"output/train/resnet-{run}/summary.csv" for run in "ab"],
    "ultralytics": [f"runs/classify/train{number}/results.csv" for number in ("", "-2")],
}
LABELS = {
    "ultralytics": ("run0", "run1"),
    "timm": ("resnet-a", "resnet-b"),
    "tensorboard": ("seed-a", "seed-b"),
    "accelerate": ("seed1", "seed2"),
}
FOLDERS = (
    "fold0",
    "fold1",
    "seed=3",
    "run",
    "a",
    "b",
    "train",
    "validation",
    "v 1",
    "größe",
    "0.1",
)


@dataclass(frozen=True)
class Run:
    """A run of a recorded program, and where it is written."""

    content: bytes
    path: Path
    truth: Series


def drawn_runs(dice: random.Random) -> list[Run]:
    folders: set[Path] = set()
    found = []
    for _ in range(dice.randint(1, 6)):
        program = dice.choice(list(RUNS))
        at = dice.randrange(len(RUNS[program]))
        source = RECORDED / program / RUNS[program][at]
        if source.is_dir():
            (source,) = source.glob("*.tfevents.*")
        folder = Path(*(dice.choice(FOLDERS) for _ in range(dice.randint(0, 3))))
        if folder in folders:
            continue
        folders.add(folder)
        label = LABELS.get(program, ("fold0", "fold1", "fold2"))[at]
        truth = {
            key.removeprefix(f"{label}:"): once(points)
            for key, points in truth_of(program).items()
            if key.startswith(f"{label}:")
        }
        found.append(Run(source.read_bytes(), folder / source.name, truth))
    return found


def pieces(dice: random.Random, runs: list[Run]) -> Iterator[tuple[Run, bytes, bool]]:
    """(run, its next bytes, whether dray looks at the files after them)."""
    left = {run.path: run.content for run in runs}
    while left:
        run = dice.choice([run for run in runs if run.path in left])
        size = dice.choice((1, 30, 200, 10_000))
        piece, rest = left[run.path][:size], left[run.path][size:]
        left[run.path] = rest
        if not rest:
            del left[run.path]
        yield run, piece, dice.random() < 0.5


def found_in(folder: Path, dice: random.Random, runs: list[Run], *, at_once: bool) -> Series:
    """at_once: dray looks only after everything is written."""
    files = MetricFiles([folder], frozenset(("tensorboard", "csv")), since=0.0)
    found: Series = {}
    looks = [*pieces(dice, runs)]
    for number, (run, piece, is_looked_at) in enumerate(looks, 1):
        path = folder / run.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(piece)
        is_more = (is_looked_at and not at_once) or number == len(looks)
        while is_more:
            for key, step, value in files.read():
                found.setdefault(key, []).append((step, value))
            is_more = files.has_more
    return found


def fault_in(folder: Path, seed: int) -> str | None:
    dice = random.Random(f"loggers {seed}")
    runs = drawn_runs(dice)
    at_once = dice.random() < 0.4
    found = found_in(folder, dice, runs, at_once=at_once)
    left = {name: points for name, points in found.items() if name.split("/")[-1] not in COUNTED}
    for run in runs:
        for key, points in run.truth.items():
            names = [
                name
                for name, values in left.items()
                if is_alike(values, points, 2e-5)
                and name in _names(run, key, runs, at_once=at_once)
            ]
            if not names:
                return f"{key} of {run.path} is in none of {sorted(left)}"
            del left[max(names, key=len)]
    return f"{[*left]} were made up" if left else None


def _names(run: Run, key: str, runs: list[Run], *, at_once: bool) -> set[str]:
    """Return the possible names: the key, after an end of the run's path. If dray saw all runs at
    once, it is the shortest end that no other run's path has, or none if no other run has the key;
    a longer end is possible only if the name could also belong to another series."""
    ends = _ends(run)
    others = [one for one in runs if one is not run]
    allowed = {"/".join((*end, key)) for end in ends}
    if at_once:
        alone = [end for end in ends[1:] if all(end not in _ends(one) for one in others)]
        is_shared = any(key in one.truth for one in others)
        order = alone or ends[-1:] if is_shared else ends[:1] + (alone or ends[-1:])
        taken = {
            "/".join((*end, other))
            for one in runs
            for end in _ends(one)
            for other in one.truth
            if (one, other) != (run, key)
        }
        allowed = set()
        for end in order:
            name = "/".join((*end, key))
            allowed.add(name)
            if name not in taken:
                return allowed
    whole = "/".join(ends[-1])
    return allowed | {f"{whole}~{number}/{key}" for number in range(len(runs))}


def _ends(run: Run) -> list[tuple[str, ...]]:
    parts = ("job", *run.path.parent.parts)
    return [parts[at:] for at in range(len(parts), -1, -1)]


@pytest.mark.parametrize("block", range(BLOCKS))
def test_runs_that_are_written_at_once_are_told_apart(block: int, tmp_path: Path) -> None:
    for seed in noted(seeds()[block::BLOCKS]):
        folder = tmp_path / str(seed)
        folder.mkdir()
        fault = fault_in(folder, seed)
        if fault is not None:
            files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*"))
            pytest.fail(f"seed {seed}: {fault}\n{files}", pytrace=False)
        shutil.rmtree(folder)
