"""The distance between the weights of a divided model and of a model in one process."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks import job_rank
from benchmarks.equality.work import MESHES, NUM_HEADS, NUM_LAYERS, NUM_STEPS, document, write_text
from benchmarks.machine import BenchmarkError
from benchmarks.report import Result, Table
from ray_workers.training.elastic.store_server import loopback_store

TIMEOUT_S = 600.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["benchmarks.job_rank"])
GOALS = {"float32": 1e-5, "float64": 1e-10}
METHOD = [
    f"The GPT of `benchmarks/equality/work.py` is trained for {NUM_STEPS} steps of AdamW, "
    "clipped, by dray's own loop without its service: in one process, and divided in each of "
    f"the ways below, on CPU over gloo, in fp32 and in fp64. It has {NUM_LAYERS} layers and "
    f"{NUM_HEADS} heads, or more if there are more stages, or more ranks along tensor and "
    "context. The last axis in a name has the size given there, or else 2. The other axes have "
    "size 2, except `data`, which takes the remaining ranks.",
    "The table shows, over all tensors of the result, the maximum norm of the difference "
    "relative to the norm of the tensor. Goals:  "
    + ", ".join(f"{goal:g} in {dtype}" for dtype, goal in GOALS.items())
    + ".",
]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """One run of each is enough: it is not a time. `num_rounds` is not used."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        folder = Path(home)
        source = write_text(folder)
        for mesh, (num_ranks, parallel) in MESHES.items():
            job = document(source, num_ranks, parallel)
            model = "{num_layers} layers, {num_heads} heads".format_map(job["model"])
            found = []
            for dtype, goal in GOALS.items():
                if not (folder / dtype / model).exists():
                    alone = {"parallel": {}, "resources": {"num_workers": 1}}
                    _train(model, dtype, folder, 1, job | alone)
                _train(mesh, dtype, folder, num_ranks, job)
                gap = furthest(folder / dtype / mesh, folder / dtype / model)
                found += [f"{gap:.1e}", "yes" if gap <= goal else "no"]
            rows.append([mesh, str(num_ranks), model, *found])
            progress(" | ".join(rows[-1]))
    return Result(
        name="equality",
        title="The same numbers whichever way a model is split",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[
            Table(
                "Largest difference of a tensor, relative to its norm",
                ["division", "ranks", "model", "fp32", "goal met", "fp64", "goal met"],
                rows,
            )
        ],
    )


def _train(name: str, dtype: str, folder: Path, num_ranks: int, job: dict[str, Any]) -> None:
    """BenchmarkError if it fails. Its ranks are forked: they would import for longer than train."""
    home = folder / dtype / name
    home.mkdir(parents=True)
    path = home / "job.json"
    path.write_text(json.dumps(job))
    store = loopback_store()
    common = (num_ranks, store.port, path, home, dtype)
    ranks = [_context.Process(target=_rank, args=(rank, *common)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + TIMEOUT_S
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        codes = [process.exitcode for process in ranks]
        raise BenchmarkError(f"{name} in {dtype}: its ranks ended with {codes}")


def _rank(rank: int, num_ranks: int, port: int, *what: Any) -> None:
    places = {"RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(at) for name, at in places.items()}
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        job_rank.train(*what)


def furthest(home: Path, other: Path) -> float:
    """The largest difference of a tensor between the results of two runs, relative to its norm."""
    found, expected = (load_file(next(each.rglob("model.safetensors"))) for each in (home, other))
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - tensor).norm() / tensor.norm().clamp_min(1e-300))
        for name, tensor in expected.items()
    )
