"""The accuracy that a job reaches, and a table that compares several jobs with the first."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Result, Table
from benchmarks.torchrun import train

TIMEOUT_S = 600.0
COLUMNS = ["", "mean", "each seed", "points", "within the goal", "claimed"]
SAID = {None: "", True: "yes", False: "no"}


def digits_accuracy(parts: Mapping[str, Any], seed: int, num_ranks: int = 1) -> float:
    """Return the validation accuracy in percent of a cnn of width 16 trained on `sklearn://digits`.

    parts: other parts of the job document. The seed also determines the split.
    """
    document = {
        "recipe": "image_classification",
        "data": {"source": "sklearn://digits"},
        "model": {"name": "cnn", "width": 16},
        "resources": {"num_workers": num_ranks},
        **parts,
    }
    epochs = document["train"]["epochs"]
    document["train"] = {"eval_every_epochs": epochs, **document["train"], "seed": seed}
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        train(document, Path(home), num_ranks=num_ranks, timeout_s=TIMEOUT_S)
        (metrics,) = Path(home).rglob("metrics.json")
        return 100 * float(json.loads(metrics.read_text())["val/accuracy"])


def compared(
    name: str,
    title: str,
    method: Sequence[str],
    contenders: Mapping[str, bool | None],
    accuracy: Callable[[str, int], float],
    seeds: Sequence[int],
    goal_points: float,
    progress: Callable[[str], None],
) -> Result:
    """Run each contender with each seed, and compare it with the first contender.

    contenders: for each name, whether it is claimed to meet the goal; None for no claim.
    """
    found: dict[str, list[float]] = {}
    reference = next(iter(contenders))
    rows = []
    for each, claimed in contenders.items():
        found[each] = [accuracy(each, seed) for seed in seeds]
        mean = statistics.mean(found[each])
        short = statistics.mean(found[reference]) - mean
        within = "" if each == reference else SAID[short <= goal_points]
        values = ", ".join(f"{value:.1f}" for value in found[each])
        rows.append([each, f"{mean:.2f}", values, f"{-short:+.2f}", within, SAID[claimed]])
        progress(" | ".join(rows[-1]))
    return Result(
        name=name,
        title=title,
        method=list(method),
        rows=[],
        comparisons=[],
        tables=[Table("Accuracy on the validation split, %", COLUMNS, rows)],
        raw=found,
    )
