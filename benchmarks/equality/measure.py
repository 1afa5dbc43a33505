"""How far the weights of a divided model are from those of one process alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file

from benchmarks.equality.work import MESHES, NUM_STEPS, document, write_text
from benchmarks.report import Result, Table
from benchmarks.torchrun import train

TIMEOUT_S = 300.0
ALONE = "one process"
GOALS = {"float32": 1e-5, "float64": 1e-10}
METHOD = [
    f"The GPT of `benchmarks/equality/work.py` is trained for {NUM_STEPS} steps of AdamW, clipped, "
    "by dray's own loop under torchrun: in one process, and divided in each of the ways below, on "
    "CPU over gloo, in fp32 and in fp64.",
    "Told is the largest, over all tensors of the result, of the norm of the difference relative "
    "to the norm of the tensor. Goals: "
    + ", ".join(f"{goal:g} in {dtype}" for dtype, goal in GOALS.items())
    + ".",
]


def measure(num_rounds: int, tell: Callable[[str], None]) -> Result:
    """One run of each is enough: it is not a time. `num_rounds` is not used."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        folder = Path(home)
        source = write_text(folder)
        for dtype in GOALS:
            _train(ALONE, dtype, source, folder)
        for mesh, (num_ranks, _) in MESHES.items():
            found = []
            for dtype, goal in GOALS.items():
                _train(mesh, dtype, source, folder)
                gap = furthest(folder / dtype / mesh, folder / dtype / ALONE)
                found += [f"{gap:.1e}", "yes" if gap <= goal else "no"]
            rows.append([mesh, str(num_ranks), *found])
            tell(" | ".join(rows[-1]))
    return Result(
        name="equality",
        title="The same numbers whichever way a model is split",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[
            Table(
                "Largest difference of a tensor, relative to its norm",
                ["division", "ranks", "fp32", "goal met", "fp64", "goal met"],
                rows,
            )
        ],
    )


def _train(mesh: str, dtype: str, source: Path, folder: Path) -> None:
    home = folder / dtype / mesh
    home.mkdir(parents=True)
    num_ranks, parallel = MESHES.get(mesh, (1, {}))
    job = document(source, num_ranks, parallel)
    train(job, home, num_ranks=num_ranks, timeout_s=TIMEOUT_S, dtype=dtype)


def furthest(home: Path, other: Path) -> float:
    """The largest difference of a tensor between the results of two runs, relative to its norm."""
    found, expected = (load_file(next(each.rglob("model.safetensors"))) for each in (home, other))
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).norm() / tensor.norm().clamp_min(1e-300))
        for name, tensor in expected.items()
    )
