"""The environment of a job document: what is refused says which field and what to do."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dray.spec import JobSpec


def of(environment: dict[str, Any], **job: Any) -> JobSpec:
    script = {"script": {"entrypoint": "train.py"}}
    return JobSpec.model_validate({**(job or script), "environment": environment})


@pytest.mark.parametrize(
    ("environment", "field", "words"),
    [
        ({"env": {"RANK": "1"}}, "/environment/env/RANK", "set by dray itself"),
        ({"env": {"DRAY_SPOOL_DIR": "/x"}}, "/environment/env/DRAY_SPOOL_DIR", "set by dray"),
        ({"env": {"A-B": "1"}}, "/environment/env/A-B", "pattern"),
        ({"env": {"A": "x\0y"}}, "/environment/env/A", "NUL"),
        ({"env": {"A": "x" * 130000, "B": "y" * 130000, "C": "z" * 9000}}, "/environment/env", ""),
        ({"env": {"A": "é" * 66000}}, "/environment/env/A", "a program is started with"),
        ({"env": {"A": "x" * (128 << 10)}}, "/environment/env/A", "a program is started with"),
        ({"python_packages": ["-r all.txt"]}, "/environment/python_packages/0", "names a file"),
        ({"python_packages": ["-eyes"]}, "/environment/python_packages/0", "names a file"),
        ({"python_packages": ["../mine"]}, "/environment/python_packages/0", "your machine"),
        ({"python_packages": ["a\nb"]}, "/environment/python_packages/0", "pattern"),
        ({"requirements": "torch\n-c pins.txt"}, "/environment/requirements", "-c names a file"),
        (
            {"requirements": "--extra-index-url https://me:hush@example.org/simple"},
            "/environment/requirements",
            "environment.index",
        ),
        ({"requirements": "a", "python_packages": ["b"]}, "/environment/requirements", "one of"),
        ({"index": {"url": "https://me:hush@example.org/"}}, "/environment/index/url", "secret"),
        ({"index": {"url": "ftp://example.org/"}}, "/environment/index/url", "pattern"),
        ({"secrets": ["../etc/passwd"]}, "/environment/secrets/0", "pattern"),
        ({"secrets": ["LD_X", "RANK"]}, "/environment/secrets/1", "set by dray"),
        ({"secrets": ["A"], "env": {"A": "1"}}, "/environment/secrets", "env sets"),
        ({"setup": [""]}, "/environment/setup/0", "at least 1"),
        ({"packages": ["a"]}, "/environment/packages", "not permitted"),
    ],
)
def test_a_bad_environment_is_refused(environment: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        of(environment)
    error = refused.value.errors()[0]
    place = error.get("ctx", {}).get("pointer")
    names = [str(part) for part in error["loc"] if part != "[key]"]
    assert (place or "/" + "/".join(names)) == field
    assert words in error["msg"]
    assert "hush" not in error["msg"]


def test_a_recipe_takes_packages_and_no_variable_that_comes_too_late() -> None:
    packages = {"python_packages": ["einops"], "env": {"PYTHONUNBUFFERED": "1"}}
    found = of(packages, recipe="image_classification").environment
    assert found is not None
    assert found.is_built
    with pytest.raises(ValidationError, match="read when an interpreter starts"):
        of({"env": {"PYTHONHASHSEED": "1"}}, recipe="image_classification")


def test_variables_and_secrets_alone_need_no_installer() -> None:
    found = of({"env": {"A": ""}, "secrets": ["TOKEN"], "requirements": " \n"}).environment
    assert found is not None
    assert not found.is_built
