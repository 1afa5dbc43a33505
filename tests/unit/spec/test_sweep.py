"""The part `sweep` of a job document: valid values, and the errors in others."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dray.input.validation import Fault, check
from dray.spec import JobSpec, Parameter
from dray.spec.trial_values import as_text, variable

LR = {"train.optimizer.lr": {"min": 1e-4, "max": 1e-1, "log": True}}
GOOD = {"metric": "val/loss", "trials": 3, "parameters": LR}
SCRIPT = {"script": {"entrypoint": "a.py", "args": ["--lr", "${lr}", "--at=${lr},${HOME}"]}}


def recipe(**changes: Any) -> dict[str, Any]:
    return {"recipe": "image_classification", "sweep": {**GOOD, **changes}}


def parameter(name: str, values: Any, **changes: Any) -> dict[str, Any]:
    return recipe(parameters={name: values}, **changes)


def grid(values: Any) -> dict[str, Any]:
    sweep = {"metric": "val/loss", "sampler": "grid", "parameters": {"train.epochs": values}}
    return {"recipe": "image_classification", "sweep": sweep}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (recipe(metric=None), "/sweep/metric", "is missing: name the metric"),
    (recipe(metric="val/mae"), "/sweep/metric", "image_classification never reports: use one of"),
    (recipe(metric=3), "/sweep/metric", "must be a valid string"),
    (recipe(trials=None), "/sweep/trials", "is missing: random requires the number of trials"),
    (recipe(trials=0), "/sweep/trials", "must be greater than or equal to 1"),
    (recipe(trials=10**10), "/sweep/trials", "must be less than or equal to 1000000000"),
    (recipe(sampler="bayes"), "/sweep/sampler", "must be 'grid', 'random' or 'optuna'"),
    (recipe(sampler="grid"), "/sweep/trials", "a grid runs one trial per combination"),
    (recipe(parameters={}), "/sweep/parameters", "must have at least 1 item"),
    (recipe(metrik=1), "/sweep/metrik", "there is no field 'metrik'"),
    (recipe(max_failed=-1), "/sweep/max_failed", "must be greater than or equal to 0"),
    (parameter("train.optimizer.lrr", [1]), "/train.optimizer.lrr", "there is no field 'lrr'"),
    (parameter("train.epochs", []), "/train.epochs", "must have at least 1 item"),
    (parameter("train.epochs", [1, 1]), "/train.epochs", "contains the value 1 twice"),
    (parameter("train.epochs", [1, "x"]), "/train.epochs", 'with the value "x": must be'),
    (parameter("train.epochs", [1, {"a": 1}]), "/train.epochs", "contains a mapping as a value"),
    (parameter("train.epochs", [[1] * 65]), "/train.epochs", "a list of more than 64 items"),
    (parameter("train.epochs", [2**60]), "/train.epochs", "an integer beyond 2**53"),
    (parameter("train.epochs", [math.inf]), "/train.epochs", "a number that is not finite"),
    (parameter("train.epochs", "1,2"), "/train.epochs", "must be an object"),
    (parameter("train.epochs", {"min": 1}), "/train.epochs", "needs a list of values, or a range"),
    (parameter("train.epochs", {"min": 0, "max": 9}), "/train.epochs", "with the value 0: must be"),
    (
        parameter("train.epochs", {"min": 9, "max": 1}),
        "/train.epochs",
        "must be less than its max of 1",
    ),
    (parameter("train.epochs", {"min": math.nan, "max": 1}), "/min", "must be a finite number"),
    (parameter("train.epochs", {"min": True, "max": 1}), "/min", "must be a number"),
    (parameter("train.epochs", {"min": 1, "max": 2**54}), "/max", "must be at most 2**53"),
    (parameter("train.epochs", {"min": 1, "max": 9, "step": 0}), "/train.epochs", "step of 0"),
    (
        parameter("train.epochs", {"min": 1, "max": 1e300, "type": "int"}),
        "/train.epochs",
        "must be at most 2**53",
    ),
    (
        parameter("train.epochs", {"min": 1, "max": 2.5, "type": "int"}),
        "/train.epochs",
        "so min, max and step must be integers",
    ),
    (
        parameter("train.optimizer.lr", {"min": 0, "max": 1, "log": True}),
        "/train.optimizer.lr",
        "log requires a min greater than 0",
    ),
    (
        parameter("train.optimizer.lr", {"min": 0.1, "max": 1, "log": True, "step": 0.1}),
        "/train.optimizer.lr",
        "must not have both log and step",
    ),
    (
        parameter("train.epochs", {"choices": [1], "min": 1}),
        "/train.epochs",
        "together with choices",
    ),
    (
        parameter("resources.num_workers", [1, 2]),
        "/resources.num_workers",
        "is not a field of train",
    ),
    (
        parameter("model.import", ["a"]),
        "/model.import",
        "is not a field of train, model, sync, federated, or can't be varied by a sweep",
    ),
    (parameter("epochs", [1]), "/epochs", "is not a field of train, model, sync"),
    (parameter("train epochs", [1]), "/train epochs", "must match pattern"),
    (parameter("model.name", ["cnnn"]), "/model.name", "must be one of 'cnn'"),
    (
        grid({"min": 0.5, "max": 1.0}),
        "/train.epochs",
        "has no discrete values, which a grid requires",
    ),
    (parameter("train.epochs", list(range(1, 300))), "/sweep/parameters", "more than 256 values"),
    (
        recipe(early_stopping={"min_steps": 10, "max_steps": 9}),
        "/sweep/early_stopping/min_steps",
        "is 10, but must be at most max_steps, which is 9",
    ),
    (recipe(early_stopping={"min_steps": 0}), "/early_stopping/min_steps", "must be greater"),
    (recipe(early_stopping={"min_steps": 1, "eta": 1}), "/eta", "must be greater than or equal"),
    (
        {**recipe(), "array": {"size": 2}},
        "/array",
        "can't be combined with sweep, which creates its own jobs",
    ),
    (
        {**SCRIPT, "sweep": {**GOOD, "parameters": {"lr": [1], "LR": [2]}}},
        "/sweep/parameters/LR",
        "and lr would both set the variable DRAY_PARAM_LR",
    ),
    (
        {**SCRIPT, "sweep": {**GOOD, "metric": "accuracy", "parameters": {"lr": [1]}}},
        "/sweep/mode",
        "dray does not know whether a lower accuracy is better",
    ),
    (
        {**SCRIPT, "sweep": GOOD},
        "/train.optimizer.lr",
        "a script's parameters are not field paths",
    ),
]


@pytest.mark.parametrize(("document", "pointer", "detail"), WRONG)
def test_a_wrong_sweep_is_refused_with_the_pointer(
    document: dict[str, Any], pointer: str, detail: str
) -> None:
    with pytest.raises(Fault) as refused:
        check(document)
    assert (refused.value.pointer or "").endswith(pointer), refused.value.pointer
    assert detail in refused.value.detail


def test_the_hint_is_the_one_of_the_field() -> None:
    with pytest.raises(Fault) as refused:
        check(parameter("train.optimizer.lrr", [1]))
    assert refused.value.hint == "did you mean 'lr'?"


def test_the_values_of_a_recipe_are_its_fields() -> None:
    spec = check({**recipe(), "model": {"name": "cnn", "width": 8}})
    document = spec.of_trial({"train.optimizer.lr": 0.5, "model.name": "mlp", "train.seed": 3})
    assert document == {
        "recipe": "image_classification",
        "model": {"name": "mlp", "width": 8},
        "train": {"optimizer": {"lr": 0.5}, "seed": 3},
    }


def test_the_values_of_a_script_are_in_its_arguments_and_in_those_of_its_roles() -> None:
    roles = {
        "ps": {"num_workers": 1, "args": ["${lr}"]},
        "worker": {"num_workers": 1},
    }
    script = {**SCRIPT["script"], "framework": "none", "roles": roles}
    spec = check({"script": script, "sweep": {**GOOD, "parameters": {"lr": [0.1, 1e-5]}}})
    trial = JobSpec.model_validate(spec.of_trial({"lr": 1e-5}))
    assert trial.script is not None
    assert trial.script.args == ["--lr", "1e-05", "--at=1e-05,${HOME}"]
    assert trial.script.roles["ps"].args == ["1e-05"]
    assert trial.script.roles["worker"].args is None


def test_a_value_as_text_is_json_but_for_texts() -> None:
    texts = [as_text(value) for value in ("a b", True, None, 3, 0.5, [1, "x"])]
    assert texts == ["a b", "true", "null", "3", "0.5", '[1, "x"]']
    assert variable("train.optimizer.lr-max") == "DRAY_PARAM_TRAIN_OPTIMIZER_LR_MAX"


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ({"min": 1, "max": 4}, [1, 2, 3, 4]),
        ({"min": 1, "max": 8, "step": 3}, [1, 4, 7]),
        ({"min": 0.1, "max": 0.3, "step": 0.1}, [0.1, 0.2, 0.3]),
        ({"min": 0, "max": 1, "step": 0.5}, [0.0, 0.5, 1.0]),
        ({"min": -0.3, "max": 0.3, "step": 0.1}, [-0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3]),
        ({"min": -0.6, "max": 0.3, "step": 0.1 + 0.2}, [-0.6, -0.3, 0.0, 0.3]),
        ({"min": -1e-3, "max": 1e-3, "step": 5e-4}, [-0.001, -0.0005, 0.0, 0.0005, 0.001]),
        ({"min": 0, "max": 2, "type": "int"}, [0, 1, 2]),
        ({"choices": [True, "a", [1]]}, [True, "a", [1]]),
    ],
)
def test_single_values_of_a_range_are_exact(given: dict[str, Any], values: list[Any]) -> None:
    found = Parameter.model_validate(given)
    assert found.num_values == len(values)
    listed = [found.value(number) for number in range(len(values))]
    assert listed == values
    assert [type(value) for value in listed] == [type(value) for value in values]


def test_the_number_of_trials_of_a_large_grid_is_counted_and_not_listed() -> None:
    spec = check(grid({"min": 1, "max": 10**6}))
    assert spec.num_jobs == 10**6
    huge = Parameter.model_validate({"min": -1e300, "max": 1e300, "step": 1e-300})
    assert huge.num_values is not None
    assert huge.num_values > 10**15
    assert Parameter(min=0, max=10**13).num_values == 10**13 + 1


@pytest.mark.parametrize(
    ("metric", "maximises"),
    [("val/loss", False), ("train/loss", False), ("val/accuracy", True), ("val/f1", True)],
)
def test_the_mode_follows_the_metric_unless_it_is_given(metric: str, maximises: bool) -> None:
    spec = check(recipe(metric=metric))
    assert spec.sweep is not None
    assert spec.sweep.maximises is maximises
    turned = check(recipe(metric=metric, mode="min" if maximises else "max"))
    assert turned.sweep is not None
    assert turned.sweep.maximises is not maximises


@pytest.mark.parametrize("as_role", [False, True])
def test_arguments_that_values_could_make_huge_are_refused_before_they_are_made(
    as_role: bool,
) -> None:
    """A megabyte of `${text}` with 260 kB in its place would be 45 GB of each trial."""
    value = ["x" * 4096] * 64
    huge: dict[str, Any] = {"args": ["${text}" * 1000] * 100}
    script = {"roles": {"chief": huge, "worker": {}}, "framework": "tensorflow"}
    document = {
        "script": {"entrypoint": "a.py", **(script if as_role else huge)},
        "sweep": {"metric": "train/loss", "sampler": "grid", "parameters": {"text": [value]}},
    }
    with pytest.raises(Fault, match="characters with the sweep's longest values") as caught:
        check(document)
    assert caught.value.pointer == "/script/args"
