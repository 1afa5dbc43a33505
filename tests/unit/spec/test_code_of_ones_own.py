"""Metrics of scripts and models of one's own, as documents give them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dray import errors, validate
from dray.spec import Imported, JobSpec
from service.planning.model.shapes import shapes_of
from service.planning.model.unknown import Unknown

NET: dict[str, Any] = {"recipe": "image_classification", "model": {"import": "my_package.net:Net"}}
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
        (
            {**PATTERN, "pattern": "loss=.*"},
            "/metrics/0/pattern",
            "one capturing group, .* but has 0",
        ),
        ({**PATTERN, "pattern": r"(a)\1"}, "/metrics/0/pattern", "RE2 regular expression"),
        ({**PATTERN, "pattern": "(a)" + "b" * 500}, "/metrics/0/pattern", "500 characters"),
        ({**PATTERN, "pattern": r"(\pL{900})"}, "/metrics/0/pattern", "too large"),
        ({**PATTERN, "step": "(a)(b)"}, "/metrics/0/step", "one capturing group, .* but has 2"),
        ({**PATTERN, "name": "train\tloss"}, "/metrics/0/name", "printable"),
        ({"name": "x"}, "/metrics/0", "requires a name and a pattern, or a source"),
        ({**PATTERN, "source": "csv"}, "/metrics/0", "omit name, pattern and step"),
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
        "context_length": None,
        "tokenizer": None,
    }
    assert JobSpec.model_validate(stored) == spec
    with pytest.raises(Unknown, match="a custom model is unknown"):
        shapes_of(spec)


TABLE = {"data": {"source": "file:///a.csv", "target": "y"}}
TEXT = {"data": {"source": "file:///a.txt"}}


@pytest.mark.parametrize(
    "document",
    [
        {"recipe": "tabular_classification", **TABLE},
        {"recipe": "tabular_regression", **TABLE},
        {"recipe": "language_model", **TEXT},
    ],
    ids=lambda document: document["recipe"],
)
@pytest.mark.parametrize(
    "strategy",
    [
        {},
        {"sync": {"every": 4}},
        {"sync": {"compression": {"name": "powersgd"}}},
        {"parallel": {"shard": 2, "zero": 1}},
        {"parallel": {"balance": "auto"}},
    ],
    ids=str,
)
def test_every_recipe_takes_a_model_of_ones_own_whole_on_each_rank(
    document: dict[str, Any], strategy: dict[str, Any]
) -> None:
    spec = validate({**NET, **document, **strategy, "resources": {"num_workers": 2}})
    assert isinstance(spec.model, Imported)
    for axis in ("tensor", "pipeline", "context"):
        error = refused({**NET, **document, "resources": {"num_workers": 2}, "parallel": {axis: 2}})
        assert error.pointer == f"/parallel/{axis}"
        assert "imported can't be divided this way" in error.detail


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
        ({"model": {**NET["model"], "context_length": 8}}, "/model/context_length"),
        ({"model": {**NET["model"], "tokenizer": "file:///t.json"}}, "/model/tokenizer"),
    ],
)
def test_what_needs_a_model_of_drays_is_refused(more: dict[str, Any], pointer: str) -> None:
    assert refused({**NET, **more}).pointer == pointer


@pytest.mark.parametrize("limit", [1, 9, "9s"])
def test_a_hang_limit_that_is_shorter_than_dray_looks_is_refused(limit: int | str) -> None:
    error = refused({"script": {"entrypoint": "train.py", "hang_limit_s": limit}})
    assert error.pointer == "/script/hang_limit_s"
    assert "must be at least 10 s" in error.detail


def test_the_least_hang_limit_is_taken() -> None:
    spec = validate({"script": {"entrypoint": "train.py", "hang_limit_s": "10s"}})
    assert spec.script is not None
    assert spec.script.hang_limit_s == 10


GIT = {"git": "https://git.example.org/me/net.git", "commit": "a" * 40}
ARCHIVE = {"url": "https://example.org/net.tar.gz", "sha256": "a" * 64}


@pytest.mark.parametrize("code", [GIT, {**GIT, "commit": "b" * 64}, ARCHIVE])
def test_code_may_be_named_elsewhere(code: dict[str, str]) -> None:
    spec = validate({"script": {"entrypoint": "train.py", "code": code}})
    assert spec.code is None
    assert spec.remote_code is not None
    assert spec.remote_code.address == code.get("git", code.get("url"))


@pytest.mark.parametrize(
    ("code", "pointer", "words"),
    [
        ({**GIT, "commit": "main"}, "/commit", "rev-parse"),
        ({**GIT, "commit": "abc1234"}, "/commit", "full hash"),
        ({"git": GIT["git"]}, "/commit", "is missing"),
        ({**GIT, "git": "ssh://git@example.org/a"}, "/git", "must start with https://"),
        ({**GIT, "git": "ext::sh -c touch% /tmp/x"}, "/git", "must start with https://"),
        ({**GIT, "git": "file:///srv/a"}, "/git", "must start with https://"),
        ({**GIT, "git": "https://me:secret@example.org/a"}, "/git", "user name or password"),
        ({**GIT, "git": "https://example.org./a"}, "/git", "ASCII letters"),
        ({**GIT, "git": "https://ex%61mple.org/a"}, "/git", "ASCII letters"),
        ({**GIT, "git": "https://example.org/a?b=1"}, "/git", "query"),
        ({**GIT, **ARCHIVE}, "", "git and commit, or url and sha256"),
        ({**ARCHIVE, "commit": "a" * 40}, "/commit", "can't be combined with sha256"),
        ({"url": ARCHIVE["url"]}, "/sha256", "is missing"),
        ({**ARCHIVE, "url": "s3://bucket/a.tar"}, "/url", "must start with https://"),
        ({**GIT, "branch": "main"}, "/branch", "no field"),
        ("code-1", "", "pattern"),
    ],
)
def test_code_elsewhere_is_named_by_what_can_not_change(
    code: object, pointer: str, words: str
) -> None:
    error = refused({"script": {"entrypoint": "train.py", "code": code}})
    assert error.pointer == f"/script/code{pointer}"
    assert re.search(words, error.detail), error.detail
