"""Parameters as columns of numbers, and the importance that a forest finds for known functions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from service.domain.tracking.importance import MAX_CATEGORIES, MISSING, encode, num_runs_at_most
from service.tracking.importance import forest

Inputs = Mapping[str, Any]


def sampled(num: int, seed: int, **ranges: Any) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    return [
        {
            name: chance.choice(of) if isinstance(of, list) else chance.uniform(*of)
            for name, of in ranges.items()
        }
        for _ in range(num)
    ]


def asked(runs: Sequence[Inputs], values: Sequence[float], num_trees: int = 60) -> dict[str, float]:
    """Return the importance of each parameter, and the share of the variance as `explained`."""
    encoded, _ = encode(runs)
    columns: list[list[float]] = []
    groups = []
    for each in encoded:
        groups.append(list(range(len(columns), len(columns) + len(each.columns))))
        columns.extend(each.columns)
    found = forest.estimate(
        groups,
        np.array(columns, dtype=np.float32).T,
        np.array(values),
        np.arange(len(values)),
        num_trees,
        np.random.default_rng(46),
    )
    names = [each.name for each in encoded]
    return {**dict(zip(names, found.importances, strict=True)), "explained": found.explained}


def slow(runs: Sequence[Inputs], function: Callable[[Inputs], float]) -> dict[str, float]:
    """Compute the total Sobol index of each parameter by a loop over all pairs of runs: half of the
    mean squared change of the function if one value is taken from another run."""
    values = [function(run) for run in runs]
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    found = {}
    for name in runs[0]:
        changes = [
            (function({**one, name: other[name]}) - function(one)) ** 2
            for one, other in itertools.product(runs[:100], runs[:100])
        ]
        found[name] = math.fsum(changes) / len(changes) / (2 * variance)
    return found


def ishigami(run: Inputs) -> float:
    a, b, c = (run[name] for name in "abc")
    return float(math.sin(a) + 7 * math.sin(b) ** 2 + 0.1 * c**4 * math.sin(a))


FUNCTIONS: dict[str, tuple[Callable[[Inputs], float], dict[str, Any], dict[str, float]]] = {
    # The variance of 3a + b is 9/12 + 1/12.
    "linear": (
        lambda run: 3 * run["a"] + run["b"],
        {"a": (0, 1), "b": (0, 1), "none": (0, 1)},
        {"a": 0.9, "b": 0.1, "none": 0.0},
    ),
    # The total indices of Ishigami's function (Saltelli 2008, section 4).
    "ishigami": (
        ishigami,
        dict.fromkeys("abc", (-math.pi, math.pi)),
        {"a": 0.557, "b": 0.442, "c": 0.244},
    ),
    "category": (
        lambda run: {"sgd": 0.0, "adamw": 4.0, "lion": 1.0}[run["name"]] + run["a"],
        {"a": (0, 1), "name": ["sgd", "adamw", "lion"], "flag": [True, False]},
        {"name": 0.971, "a": 0.029, "flag": 0.0},
    ),
    # A product of symmetric factors has no main effects: each total index is 1.
    "product": (
        lambda run: run["a"] * run["b"],
        {"a": [-1, 1], "b": [-1, 1], "none": [1, 2, 3]},
        {"a": 1.0, "b": 1.0, "none": 0.0},
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_importance_is_the_share_of_the_variance(name: str) -> None:
    function, ranges, shares = FUNCTIONS[name]
    runs = sampled(300, 46, **ranges)
    exact = slow(runs, function)
    found = asked(runs, [function(run) for run in runs])
    assert found["explained"] > 0.6
    for parameter, share in shares.items():
        assert exact[parameter] == pytest.approx(share, abs=0.12)
        # A forest explains less than all of the variance, so it finds less than the exact share.
        assert share * 0.55 - 0.05 < found[parameter] < share + 0.1, found
    ranked = sorted(shares, key=lambda one: -found[one])
    assert name == "product" or ranked == sorted(shares, key=lambda one: -shares[one])


def test_a_metric_that_depends_on_nothing_is_not_explained() -> None:
    chance = random.Random(46)
    runs = sampled(60, 46, a=(0, 1), b=(0, 1))
    assert asked(runs, [chance.gauss(0, 1) for _ in runs])["explained"] < 0.1


def test_the_answer_is_always_the_same_and_does_not_depend_on_the_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forest, "NUM_TREES", 50)
    monkeypatch.setattr(forest, "NUM_RESAMPLES", 5)
    runs = sampled(30, 46, a=(0, 1), b=(0, 1))
    values = [run["a"] + run["b"] for run in runs]

    def answer(runs: Sequence[Inputs], values: Sequence[float]) -> dict[str, Any]:
        parameters = [each.columns for each in encode(runs)[0]]
        return forest.answer({"parameters": parameters, "values": values})

    once = answer(runs, values)
    assert once == answer(runs, values)
    assert all(0 < each < 0.3 for each in once["deviations"])
    logged = [{"a": 1e-300 * 10 ** (100 * run["a"]), "b": 1e300 * run["b"]} for run in runs]
    large = answer(logged, [1e300 * value for value in values])
    assert large["importances"] == pytest.approx(once["importances"], abs=0.05)


def test_parameters_become_columns() -> None:
    runs: list[dict[str, Any]] = [
        {"lr": 0.1, "name": "sgd", "twin": "x", "fixed": 1, "when": 5},
        {"lr": 0.01, "name": "adam", "twin": "y", "fixed": 1.0},
        {"lr": 0.1, "name": "sgd", "twin": "x", "fixed": 1, "when": 7},
        {"lr": 1, "name": None, "twin": None, "fixed": 1, "when": [1]},
    ]
    encoded, constant = encode(runs)
    assert constant == ["fixed"]
    found = {each.name: each for each in encoded}
    assert found["lr"].columns == [[1.0, 0.0, 1.0, 2.0]]
    assert (found["name"].same_as, found["name"].num_values) == (["twin"], 3)
    assert sorted(found["name"].columns) == [[0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0]]
    assert found["when"].num_values == 4
    # The rank of the numbers, whether there is a number, whether it is missing, the list.
    assert found["when"].columns[0] == [0.0, -1.0, 1.0, -1.0]
    assert sorted(found["when"].columns[1:]) == [[0, 0, 0, 1], [0, 1, 0, 0], [1, 0, 1, 0]]
    assert encode([]) == ([], [])


def test_only_what_a_tree_can_not_distinguish_is_joined() -> None:
    runs = [{"a": n, "up": 2.0**n, "down": -n, "shuffled": 7 * n % 5} for n in (2, 0, 4, 1, 3)]
    encoded, _ = encode(runs)
    assert [(each.name, each.same_as) for each in encoded] == [
        ("a", ["down", "up"]),
        ("shuffled", []),
    ]
    two = [{"lr": lr, "name": name} for lr, name in ((0.1, "x"), (0.2, "y"), (0.1, "x"))]
    assert [(each.name, each.same_as) for each in encode(two)[0]] == [("lr", ["name"])]


def test_true_is_not_1_and_many_categories_are_limited() -> None:
    encoded, _ = encode([{"a": 1}, {"a": True}, {"a": 1.0}])
    assert encoded[0].num_values == 2
    encoded, _ = encode([{"a": f"run {n}"} for n in range(100)])
    assert (len(encoded[0].columns), encoded[0].num_values) == (MAX_CATEGORIES, 100)
    assert [num_runs_at_most(n) for n in (0, 1, 12, 13, 24, 10_000)] == [
        *(1000, 1000, 1000),
        *(923, 500, 20),
    ]


def test_equal_partitions_are_equal_columns_by_chance() -> None:
    """Whatever the values are, a tree can separate all runs whose values differ."""
    chance = random.Random(46)
    pool = [1, 2.5, -3, 0, True, False, None, "a", "b", [1], [1, 2], MISSING]
    for _ in range(300):
        column = [chance.choice(pool) for _ in range(chance.randint(2, 12))]
        runs = [{} if value is MISSING else {"p": value} for value in column]
        encoded, constant = encode(runs)
        distinct = {"missing" if v is MISSING else f"{type(v) is bool} {v}" for v in column}
        if not encoded:
            assert len(distinct) == 1
            assert constant == ([] if column[0] is MISSING else ["p"])
            continue
        rows = set(zip(*encoded[0].columns, strict=True))
        assert (len(rows), encoded[0].num_values) == (len(distinct), len(distinct))
