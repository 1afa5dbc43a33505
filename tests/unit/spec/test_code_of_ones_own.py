"""Metrics of scripts and models of one's own, as documents give them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dray import errors, validate
from dray.spec import JobSpec
from service.planning.model.shapes import Unknown, shapes_of

NET = {"recipe": "image_classification", "model": {"import": "my_package.net:Net"}}
SCRIPT = {"script": {"entrypoint": "train.py"}}
PATTERN = {"name": "train/loss", "pattern": "loss=([0-9.]+)"}


def refused(document: dict[str, Any]) -> errors.SpecError:
    with pytest.raises(errors.SpecError) as caught:
        validate(document)
    return caught.value


@pytest.mark.parametrize(
    ("metric", "pointer", "words"),
    [
        ({**PATTERN, "pattern": "loss=("}, "/metrics/0/pattern", r"missing \)"),
        ({**PATTERN, "pattern": "loss=.*"}, "/metrics/0/pattern", "one group .* and has 0"),
        ({**PATTERN, "pattern": r"(a)\1"}, "/metrics/0/pattern", "regular expression of RE2"),
        ({**PATTERN, "pattern": "(a)" + "b" * 500}, "/metrics/0/pattern", "500 characters"),
        ({**PATTERN, "pattern": r"(\pL{900})"}, "/metrics/0/pattern", "too large"),
        ({**PATTERN, "step": "(a)(b)"}, "/metrics/0/step", "one group .* and has 2"),
        ({**PATTERN, "name": "Train Loss"}, "/metrics/0/name", "pattern"),
        ({"name": "x"}, "/metrics/0", "needs a name and a pattern, or a source"),
        ({**PATTERN, "source": "csv"}, "/metrics/0", "give that alone"),
        ({**PATTERN, "rank": 1}, "/metrics/0/rank", "below resources.num_workers, which is 1"),
        ({"source": "mlflow"}, "/metrics/0/source", "tensorboard"),
    ],
)
def test_a_metric_that_can_not_be_found_is_refused_with_its_field(
    metric: dict[str, Any], pointer: str, words: str
) -> None:
    error = refused({**SCRIPT, "metrics": [metric]})
    assert error.pointer == pointer
    assert re.search(words, error.detail), error.detail


def test_metrics_are_for_scripts() -> None:
    error = refused({"recipe": "image_classification", "metrics": [PATTERN]})
    assert error.pointer == "/metrics"


def test_a_model_of_ones_own_is_stored_as_it_was_written() -> None:
    spec = validate(NET)
    stored = spec.model_dump(mode="json")
    assert stored["model"] == {
        "name": "imported",
        "import": "my_package.net:Net",
        "args": {},
        "code": None,
    }
    assert JobSpec.model_validate(stored) == spec
    with pytest.raises(Unknown, match="nothing is known of a model of your own"):
        shapes_of(spec)


@pytest.mark.parametrize(
    ("more", "pointer"),
    [
        ({"model": {"import": "my_package.net"}}, "/model/import"),
        ({"model": {"import": "my-package:Net"}}, "/model/import"),
        ({"resources": {"num_workers": 2}, "elastic": {"min_workers": 1}}, "/elastic"),
        ({"resources": {"num_workers": 2}, "parallel": {"shard": 2}}, "/parallel/zero"),
        ({"resources": {"num_workers": 2}, "parallel": {"tensor": 2}}, "/parallel/tensor"),
        ({"init_from": {"job": "job-1"}}, "/init_from"),
        ({"train": {"recompute": "full"}}, "/train/recompute"),
        ({"recipe": "language_model", "data": {"source": "file:///a.txt"}}, "/model/name"),
    ],
)
def test_what_needs_a_model_of_drays_is_refused(more: dict[str, Any], pointer: str) -> None:
    assert refused({**NET, **more}).pointer == pointer
