"""Estimates the importance of parameters with a random forest. Runs as a process, which reads a
question from its standard input and writes the answer to its standard output, both JSON.

The importance of a parameter is its permutation importance (Breiman 2001): the amount by which the
squared error of a tree increases, for the runs on which the tree was not trained, if these runs
exchange their values of the parameter. It is divided by twice the variance of the metric. For a
model without errors and independent parameters, the quotient is the total Sobol index (Jansen
1999): the share of the variance that depends on the parameter, alone or together with others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.tree import DecisionTreeRegressor

NUM_TREES = 200
NUM_RESAMPLES = 30
"""Number of bootstrap samples of the runs, from which the standard deviations are computed."""
TREES_OF_RESAMPLE = 20
SEED = 46

Floats = NDArray[np.float64]


class Estimate(NamedTuple):
    explained: float
    """The share of the variance that the forest explains, for runs on which it was not trained:
    1 minus the squared error divided by the variance."""
    importances: Floats
    """One number per parameter."""


def estimate(
    groups: Sequence[Sequence[int]],
    inputs: NDArray[np.float32],
    values: Floats,
    runs: NDArray[np.int64],
    num_trees: int,
    random: np.random.Generator,
) -> Estimate:
    """Train a forest on `runs`, which can contain a run several times.

    groups: the columns of each parameter. inputs: (runs, columns). values: the metric of each run.
    """
    distinct = np.unique(runs)
    variance = float(np.var(values[runs]))
    if variance == 0:
        return Estimate(0.0, np.zeros(len(groups)))
    total: Floats = np.zeros(len(groups))
    summed, counts = np.zeros(len(values)), np.zeros(len(values))
    num_used = 0
    for _ in range(num_trees):
        bag = random.choice(runs, len(runs))
        out = np.setdiff1d(distinct, bag)
        if len(out) < 2:
            continue
        tree = DecisionTreeRegressor(random_state=int(random.integers(2**31)))
        tree.fit(inputs[bag], values[bag])
        exchanged = np.repeat(inputs[out][np.newaxis], len(groups) + 1, axis=0)
        for number, columns in enumerate(groups):
            others = random.permutation(out)
            exchanged[number + 1][:, columns] = inputs[others][:, columns]
        predicted = tree.tree_.predict(exchanged.reshape(-1, inputs.shape[1]))
        predicted = predicted.reshape(len(groups) + 1, len(out))
        errors = np.mean((values[out] - predicted) ** 2, axis=1)
        total += errors[1:] - errors[0]
        summed[out] += predicted[0]
        counts[out] += 1
        num_used += 1
    known = counts > 0
    error = np.mean((values[known] - summed[known] / counts[known]) ** 2)
    around = np.var(values[known])
    explained = 1 - error / around if around > 0 else 0.0
    return Estimate(float(explained), total / (2 * variance * max(1, num_used)))


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the importance of each parameter with its standard deviation.

    question: `parameters`, the columns of each parameter, and `values`, the metric of each run.
    """
    parameters: Sequence[Sequence[Sequence[float]]] = question["parameters"]
    groups: list[list[int]] = []
    columns: list[Sequence[float]] = []
    for own in parameters:
        groups.append(list(range(len(columns), len(columns) + len(own))))
        columns.extend(own)
    inputs = np.array(columns, dtype=np.float32).T
    values: Floats = np.array(question["values"], dtype=np.float64)
    values = values / (np.max(np.abs(values)) or 1.0)  # the squares of large values would overflow
    every = np.arange(len(values))
    random = np.random.default_rng(SEED)
    whole = estimate(groups, inputs, values, every, NUM_TREES, random)
    again = [
        estimate(
            groups, inputs, values, random.choice(every, len(every)), TREES_OF_RESAMPLE, random
        )
        for _ in range(NUM_RESAMPLES)
    ]
    return {
        "explained": whole.explained,
        "importances": whole.importances.tolist(),
        "deviations": np.std([one.importances for one in again], axis=0, ddof=1).tolist(),
    }


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
