"""The values of trials, and successive halving, compared with simple implementations."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest

from dray.spec import Sweep
from service.domain.sweeps.halving import Ranked, Reached, TrialStanding, follow, rung_at
from service.domain.sweeps.sampling import values_of

LR = {"min": 1e-4, "max": 1e-1, "log": True}


def sweep(**fields: Any) -> Sweep:
    """Return a sweep that minimises `loss`."""
    given = {"metric": "loss", "mode": "min", "trials": 50, "parameters": {"lr": LR}, **fields}
    return Sweep.model_validate(given)


def halving(min_steps: int = 10, eta: int = 3, **fields: Any) -> Sweep:
    rules = {"min_steps": min_steps, "eta": eta, **fields.pop("rules", {})}
    return sweep(early_stopping=rules, **fields)


def test_a_grid_is_the_product_of_its_values() -> None:
    given = {"a": [1, 2], "b": {"min": 0, "max": 2}, "c": ["x", "y"]}
    found = sweep(sampler="grid", trials=None, parameters=given)
    assert found.num_trials == 12
    product = itertools.product([1, 2], [0, 1, 2], ["x", "y"])
    expected = [dict(zip("abc", combination, strict=True)) for combination in product]
    assert [values_of(found, index) for index in range(12)] == expected
    assert list(values_of(found, 5)) == ["a", "b", "c"]


def test_a_random_search_is_the_same_for_the_same_seed_alone() -> None:
    given = {
        "lr": LR,
        "n": {"min": 1, "max": 6},
        "act": ["relu", "gelu"],
        "x": {"min": 0.0, "max": 1},
    }
    one, again, other = (sweep(parameters=given, seed=seed) for seed in (4, 4, 5))
    drawn = [values_of(one, index) for index in range(50)]
    assert drawn == [values_of(again, index) for index in range(50)]
    assert drawn != [values_of(other, index) for index in range(50)]
    assert all(1e-4 <= values["lr"] <= 1e-1 and 0.0 <= values["x"] <= 1.0 for values in drawn)
    assert {values["n"] for values in drawn} == {1, 2, 3, 4, 5, 6}
    assert {values["act"] for values in drawn} == {"relu", "gelu"}
    below = sum(values["lr"] < 10**-2.5 for values in drawn)  # the middle of the logarithm
    assert 15 <= below <= 35


def test_whole_numbers_by_their_logarithm_have_whole_bins_at_both_ends() -> None:
    """An integer k corresponds, as in Optuna, to the logarithms from k - 1/2 to k + 1/2, so the
    shares of 1 to 4 are log(3) / log(9), log(5/3) / log(9), and so on."""
    drawn = sweep(parameters={"n": {"min": 1, "max": 4, "log": True}})
    counts = Counter(values_of(drawn, index)["n"] for index in range(20_000))
    whole = math.log(4.5 / 0.5)
    for number in range(1, 5):
        expected = math.log((number + 0.5) / (number - 0.5)) / whole
        assert counts[number] / 20_000 == pytest.approx(expected, abs=0.01)
    large = sweep(parameters={"n": {"min": 1000, "max": 2**53, "log": True}})
    assert min(values_of(large, index)["n"] for index in range(2000)) >= 1000


def test_the_values_of_a_seed_never_change() -> None:
    given = {"lr": LR, "n": {"min": 1, "max": 6}}
    assert values_of(sweep(parameters=given, seed=7), 3) == {"lr": 0.000865509, "n": 2}


@pytest.mark.parametrize(
    ("step", "rung"),
    [(1, None), (9, None), (10, 0), (29, 0), (30, 1), (89, 1), (90, 2), (10**12, 23)],
)
def test_a_rung_is_at_min_steps_times_a_power_of_eta(step: int, rung: int | None) -> None:
    rules = halving().early_stopping
    assert rules is not None
    assert rung_at(rules, step) == rung


def test_no_rung_is_at_or_beyond_max_steps() -> None:
    rules = halving(rules={"max_steps": 90}).early_stopping
    assert rules is not None
    assert [rung_at(rules, step) for step in (30, 89, 90, 1000)] == [1, 1, 1, 1]
    only = halving(rules={"max_steps": 10}).early_stopping
    assert only is not None
    assert rung_at(only, 1000) is None


def test_a_trial_is_judged_once_on_a_rung_by_its_first_report_there() -> None:
    found = halving()
    standing, reached = follow(found, TrialStanding(), [(5, 3.0), (12, 2.0), (15, 1.0)])
    assert reached == [Reached(0, 12, 2.0)]
    assert standing == TrialStanding(1.0, 15, 15, 0)
    standing, reached = follow(found, standing, [(28, 0.5), (31, 4.0)])
    assert reached == [Reached(1, 31, 0.5)]


def test_rungs_between_two_reports_are_passed_over() -> None:
    _, reached = follow(halving(), TrialStanding(), [(95, 1.0), (100, 0.5)])
    assert reached == [Reached(2, 95, 1.0)]


def test_steps_that_were_reported_before_change_nothing() -> None:
    found = halving(by="last")
    standing, _ = follow(found, TrialStanding(), [(20, 1.0)])
    again, reached = follow(found, standing, [(11, 9.0), (20, 9.0)])
    assert (again, reached) == (standing, [])


@pytest.mark.parametrize(("mode", "value", "step"), [("min", 1.0, 2), ("max", 3.0, 1)])
def test_the_value_is_the_best_and_of_equals_the_first(mode: str, value: float, step: int) -> None:
    points = [(1, 3.0), (2, 1.0), (3, math.nan), (4, 1.0), (5, 3.0), (6, math.inf), (7, -math.inf)]
    standing, _ = follow(sweep(mode=mode), TrialStanding(), points)
    assert (standing.value, standing.value_step, standing.last_step) == (value, step, 7)


def test_the_last_value_may_be_no_number() -> None:
    found = sweep(by="last")
    standing, _ = follow(found, TrialStanding(), [(1, 3.0), (2, 4.0)])
    assert (standing.value, standing.value_step) == (4.0, 2)
    standing, _ = follow(found, standing, [(3, math.nan)])
    assert (standing.value, standing.value_step) == (None, 3)


def plainly(eta: int, judged: list[float]) -> bool:
    """Whether the last evaluated trial continues, determined by sorting with NaN as the worst
    value."""
    ranked = sorted(judged, key=lambda loss: math.inf if math.isnan(loss) else loss)
    if math.isnan(judged[-1]):
        return all(map(math.isnan, judged))
    worst_that_goes_on = ranked[max(1, len(judged) // eta) - 1]
    return math.isnan(worst_that_goes_on) or judged[-1] <= worst_that_goes_on


def counted(eta: int, judged: list[float]) -> bool:
    """Whether the last evaluated trial continues according to the rule, which counts."""
    own = None if math.isnan(judged[-1]) else judged[-1]
    better = sum(not math.isnan(x) and (own is None or x < own) for x in judged)
    return Ranked(len(judged), better).goes_on(eta, own)


@pytest.mark.parametrize("eta", [2, 3, 4, 10])
@pytest.mark.parametrize("seed", range(20))
def test_halving_decides_as_a_plain_implementation(eta: int, seed: int) -> None:
    draw = random.Random(seed)
    rung: list[float] = []
    for _ in range(60):
        rung.append(math.nan if draw.random() < 0.2 else draw.randrange(12) / 10)
        goes_on = counted(eta, rung)
        assert goes_on == plainly(eta, rung)
        if rung[-1] == min((x for x in rung if not math.isnan(x)), default=None):
            assert goes_on, "the best of a rung was stopped"


@pytest.mark.parametrize("seed", range(5))
def test_a_whole_sweep_stops_the_trials_that_a_plain_one_stops(seed: int) -> None:
    """Process the reports of all trials in random order, with the rules and with a simple loop."""
    draw = random.Random(seed)
    found = halving(min_steps=2, eta=2)
    losses = {trial: [draw.random() + 1 / step for step in range(1, 33)] for trial in range(16)}
    order = [trial for trial in losses for _ in range(32)]
    draw.shuffle(order)

    rungs: dict[int, list[float]] = {}
    standings = dict.fromkeys(losses, TrialStanding())
    stopped: dict[int, int] = {}
    plain_rungs: dict[int, list[float]] = {}
    plain_stopped: dict[int, int] = {}
    at = dict.fromkeys(losses, 0)
    for trial in order:
        at[trial] += 1
        step = at[trial]
        if trial not in stopped:
            point = (step, losses[trial][step - 1])
            standings[trial], reached = follow(found, standings[trial], [point])
            for one in reached:
                assert one.value is not None
                judged = rungs.setdefault(one.rung, [])
                judged.append(one.value)
                if not counted(2, judged):
                    stopped[trial] = step
        if trial not in plain_stopped and step in (2, 4, 8, 16, 32):
            best = min(losses[trial][:step])
            seen = plain_rungs.setdefault(step, [])
            seen.append(best)
            if best > sorted(seen)[max(1, len(seen) // 2) - 1]:
                plain_stopped[trial] = step
    assert stopped == plain_stopped
    assert 0 < len(stopped) < 16
