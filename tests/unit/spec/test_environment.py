"""The environment of a job document: refusals name the field and what to do."""

from __future__ import annotations

import contextlib
import time
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
        ({"env": {"A": "é" * 66000}}, "/environment/env/A", "but Linux allows at most"),
        ({"env": {"A": "x" * (128 << 10)}}, "/environment/env/A", "but Linux allows at most"),
        ({"python_packages": ["-r all.txt"]}, "/environment/python_packages/0", "names a file"),
        ({"python_packages": ["-eyes"]}, "/environment/python_packages/0", "your machine"),
        ({"python_packages": ["../mine"]}, "/environment/python_packages/0", "your machine"),
        *(
            ({"requirements": f"torch\n{line}\n"}, "/environment/requirements", words)
            for line, words in {
                "file:///etc/x.whl": "https://",
                "FILE:///etc/x.whl": "https://",
                "name @ file:///etc/x.whl": "name must come from",
                "name@ ./x": "name must come from",
                "name @ git+ssh://host/x": "name must come from",
                "name>=1 file:///etc/x.whl": "not in the form NAME @ URL",
                "/etc/x.whl": "/etc/x.whl must come from",
                "sub/x.whl": "sub/x.whl must come from",
                "x-1.0.whl": "x-1.0.whl must come from",
                "--find-links /etc": "--find-links must come from",
                "--find-links=wheels": "--find-links must come from",
                "-f/etc": "-f must come from",
                "--index-url file:///etc": "--index-url must come from",
                "--find-links \\\n  /etc": "--find-links must come from",
                "# a comment \\\n-r all.txt": "-r names a file",
                "-e .": "-e names a package on your machine",
                "=1.0": "a line must come from an index",
                "name @ https://example.org/${TOKEN}": "variables are not expanded",
                "--global-option=x": "is not allowed",
                "name @ HTTPS://me:hush@example.org/x": "environment.index",
                "name @ git+https://hush@example.org/x": "environment.index",
                "--find-links me:hush@example.org": "--find-links must come from",
                "name @ https://hidden.org\\@example.org/x": "environment.index",
            }.items()
        ),
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
        ({"index": {"url": "file:///etc"}}, "/environment/index/url", "pattern"),
        ({"secrets": ["../etc/passwd"]}, "/environment/secrets/0", "pattern"),
        ({"secrets": ["LD_X", "RANK"]}, "/environment/secrets/1", "set by dray"),
        ({"secrets": ["A"], "env": {"A": "1"}}, "/environment/secrets", "also set in env"),
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


def test_requirements_by_name_or_address_are_taken_and_their_addresses_known() -> None:
    lines = [
        "# not https://asked.org",
        "a",
        "b[x, y] >= 1, <3 ; python_version > '3'  # why",
        "c (==1)",
        "d==1 \\",
        "    --hash=sha256:00",
        "e @ https://one.org/e.whl#sha256=00 ; sys_platform == 'linux'",
        "git+https://two.org/f@v1#egg=f",
        "--index-url https://three.org/simple",
        "-f http://four.org/",
        "--only-binary :all:",
    ]
    both = {"requirements": "\n".join(lines), "index": {"url": "https://five.org/simple"}}
    found = of(both).environment
    assert found is not None
    assert found.addresses == [
        ("/environment/requirements", "https://one.org/e.whl#sha256=00"),
        ("/environment/requirements", "git+https://two.org/f@v1#egg=f"),
        ("/environment/requirements", "https://three.org/simple"),
        ("/environment/requirements", "http://four.org/"),
        ("/environment/index/url", "https://five.org/simple"),
    ]


@pytest.mark.parametrize("text", ["a" * 250_000, "a" + " " * 250_000 + "x", "[" * 250_000])
def test_long_requirements_are_read_in_time(text: str) -> None:
    begun = time.process_time()
    with contextlib.suppress(ValidationError):
        of({"requirements": text})
    assert time.process_time() - begun < 5


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
