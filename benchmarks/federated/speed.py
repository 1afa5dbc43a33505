"""Seconds of a round of 1,000 simulated clients, compared with Flower's simulation with Ray."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import torchrun
from benchmarks.figures import ratio_of_medians
from benchmarks.machine import ROOT, BenchmarkError, clean_environment, wait_until_quiet
from benchmarks.report import Comparison, Result, Row
from dray.spec import JobSpec
from dray.train.spool import segments
from ray_workers.recipes import RECIPES
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.parallel.federated.simulation.partition import divide

FLOWER = ROOT / ".venv-flower" / "bin" / "python"
CLIENTS, ROUNDS, RANKS = 1000, 5, 2
GOAL = 0.1
TIMEOUT_S = 900.0
METHOD = [
    f"All {CLIENTS:,} clients take part in every round. Each has a part of `sklearn://digits` "
    "and trains a perceptron with one hidden layer of 32 for two local epochs, with fedavg. "
    f"dray has {RANKS} ranks and Flower has {RANKS} processes, with one thread each. Neither "
    "evaluates. The clients of dray and Flower have the same samples, in the same batches "
    "except for their order.",
    f"dray and Flower take turns of {ROUNDS} rounds. The first round of each turn is not "
    "counted, because it starts processes. The duration of a round is `perf/step_time_s` of "
    "rank 0 for dray, and the time between two calls of the server's `evaluate_fn` for Flower. "
    "Ray's own processes run only during Flower's turns.",
]


def document() -> dict[str, Any]:
    return {
        "recipe": "image_classification",
        "data": {"source": "sklearn://digits"},
        "model": {"name": "mlp", "width": 32, "num_layers": 1},
        "train": {"optimizer": {"name": "sgd", "lr": 0.1}},
        "resources": {"num_workers": RANKS},
        "federated": {
            "clients": CLIENTS,
            "clients_per_round": CLIENTS,
            "rounds": ROUNDS,
            "local_epochs": 2,
            "batch_size": 8,
            "evaluate_every": ROUNDS,
        },
    }


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """`num_rounds` turns of each."""
    if not FLOWER.exists():
        raise BenchmarkError(f"there is no {FLOWER}: `make bench` installs it")
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder:
        job = _job_of_flower(Path(folder))
        for turn in range(num_rounds):
            wait_until_quiet()
            ours += _of_dray(Path(folder) / f"dray-{turn}")
            wait_until_quiet()
            theirs += _of_flower(job, Path(folder) / f"flower-{turn}.json")
            progress(f"turn {turn}: dray {ours[-1]:.2f} s, Flower {theirs[-1]:.2f} s")
    ratio = ratio_of_medians(ours, theirs)
    same = ratio_of_medians(ours[::2], ours[1::2])
    goal = f"at most {GOAL:g}: ten times as fast"
    return Result(
        name="federated_speed",
        title=f"A round of {CLIENTS:,} simulated clients",
        method=METHOD,
        rows=[Row("dray", ours), Row("Flower", theirs)],
        comparisons=[
            Comparison("dray / Flower", len(ours), ratio, same, goal, ratio.value <= GOAL)
        ],
    )


def _of_dray(home: Path) -> list[float]:
    """The seconds of each round but the first."""
    home.mkdir()
    torchrun.train(document(), home, num_ranks=RANKS, timeout_s=TIMEOUT_S)
    lines = [
        json.loads(line)
        for _, path in segments(home / "spool-0")
        for line in path.read_text().splitlines()
    ]
    steps = {
        frame["body"]["step"]: frame["body"]["values"]["perf/step_time_s"]
        for frame in lines
        if frame["kind"] == "metrics" and "perf/step_time_s" in frame["body"]["values"]
    }
    return [seconds for step, seconds in sorted(steps.items()) if step > 1]


def _job_of_flower(folder: Path) -> Path:
    """The file that Flower's side reads: the same samples, divided in the same way."""
    spec = JobSpec.model_validate(document())
    assert spec.federated is not None
    workload = RECIPES["image_classification"].build(spec, DataPolicy.open())
    partition, seed = spec.federated.partition, spec.train.seed
    clients = divide(partition, CLIENTS, workload.train, workload.validation, seed).train
    inputs, targets = workload.train.fetch(workload.train.rows)
    path = folder / "job.npz"
    np.savez(
        path,
        inputs=inputs.flatten(1).numpy(),
        targets=targets.numpy(),
        numbers=np.concatenate(clients),
        ends=np.cumsum([len(one) for one in clients]),
        width=32,
        lr=spec.train.optimizer.lr,
        local_epochs=spec.federated.local_epochs,
        batch_size=spec.federated.batch_size,
        rounds=ROUNDS,
    )
    return path


def _of_flower(job: Path, target: Path) -> list[float]:
    """The seconds of each round but the first."""
    code = "from benchmarks.federated.flower import main; main()"
    ended = subprocess.run(
        [str(FLOWER), "-c", code, str(job), str(RANKS), str(target)],
        cwd=ROOT,
        env=clean_environment() | {"PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if ended.returncode != 0 or not target.exists():
        raise BenchmarkError(f"Flower's simulation failed:\n{ended.stderr[-3000:]}")
    seconds: list[float] = json.loads(target.read_text())
    return seconds[1:]
