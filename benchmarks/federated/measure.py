"""The rounds that each algorithm takes to an accuracy where clients differ most."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.federated.curves import measured
from benchmarks.report import Result, Table

CLIENTS, PER_ROUND, LOCAL_EPOCHS, BATCH_SIZE = 20, 10, 5, 24
TARGET, MOST_ROUNDS = 0.85, 100
SEEDS = range(5)
TUNING_SEED = 5
"""The seed with which rates are chosen, which is none of those that are compared."""
RATES = (0.03, 0.1, 0.3, 1.0)
SERVER_RATES = (0.01, 0.03, 0.1)

ALGORITHMS: dict[str, list[tuple[float, dict[str, Any]]]] = {
    "fedavg": [(lr, {}) for lr in RATES],
    "scaffold": [(lr, {}) for lr in RATES],
    "fedadam": [(lr, {"server": {"lr": one}}) for lr in RATES for one in SERVER_RATES],
}
"""(the clients' rate, other options) to choose from."""
METHOD = [
    f"`sklearn://digits` on {CLIENTS} clients with one digit each. In each round, {PER_ROUND} of "
    f"them train a perceptron with one hidden layer of 32 for {LOCAL_EPOCHS} local epochs in "
    f"batches of {BATCH_SIZE}. The figure is the number of rounds until the validation accuracy, "
    f"measured after each round, first reaches {TARGET:.0%}, or {MOST_ROUNDS} if it never does.",
    "Each algorithm uses the learning rates that need the fewest rounds with seed "
    f"{TUNING_SEED}, chosen from {', '.join(map(str, RATES))} for the clients' sgd and, for "
    f"fedadam, also for the server from {', '.join(map(str, SERVER_RATES))}. The results are for "
    f"seeds {SEEDS[0]} to {SEEDS[-1]}, which determine the split, the weights, the clients in "
    "each round and their order.",
    "The claim is that scaffold and fedadam need fewer rounds than fedavg, by the median over "
    "the seeds (Karimireddy et al. 2020, Reddi et al. 2021).",
]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """One run for each seed: rounds do not vary with time, so `num_rounds` is not used."""
    torch.set_num_threads(1)
    found: dict[str, list[int]] = {}
    rows = []
    for name, choices in ALGORITHMS.items():
        tried = [rounds_to_target(name, *choice, TUNING_SEED) for choice in choices]
        lr, options = choices[tried.index(min(tried))]
        found[name] = [rounds_to_target(name, lr, options, seed) for seed in SEEDS]
        median = statistics.median(found[name])
        reference = statistics.median(found["fedavg"])
        fewer = "" if name == "fedavg" else {True: "yes", False: "no"}[median < reference]
        server = options.get("server", {}).get("lr", "")
        each = ", ".join(map(str, found[name]))
        rows.append([name, f"{lr:g}", f"{server}", each, f"{median:g}", fewer])
        progress(" | ".join(rows[-1]))
    columns = ["", "clients' rate", "server's rate", "each seed", "median", "fewer than fedavg"]
    return Result(
        name="federated",
        title="Rounds of federated algorithms where clients differ most",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[Table(f"Rounds to {TARGET:.0%}", columns, rows)],
        raw=found,
    )


def rounds_to_target(algorithm: str, lr: float, options: dict[str, Any], seed: int) -> int:
    document = {
        "recipe": "image_classification",
        "data": {"source": "sklearn://digits"},
        "model": {"name": "mlp", "width": 32, "num_layers": 1},
        "train": {"optimizer": {"name": "sgd", "lr": lr}, "seed": seed},
        "federated": {
            "algorithm": algorithm,
            "clients": CLIENTS,
            "clients_per_round": PER_ROUND,
            "rounds": MOST_ROUNDS,
            "local_epochs": LOCAL_EPOCHS,
            "batch_size": BATCH_SIZE,
            "partition": {"by": "classes", "classes_per_client": 1},
            **options,
        },
    }
    for number, metrics in enumerate(measured(document), start=1):
        if metrics["val/accuracy"] >= TARGET:
            return number
    return MOST_ROUNDS
