"""Job documents of tests, and the first error of one that is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dray.spec import JobSpec

SCRIPT: dict[str, Any] = {"script": {"entrypoint": "x.py"}}


def images(**fields: Any) -> dict[str, Any]:
    return recipe("image_classification", **fields)


def recipe(name: str, **fields: Any) -> dict[str, Any]:
    defaults: dict[str, dict[str, Any]] = {
        "image_classification": {},
        "image_segmentation": {"data": {"source": "file:///scans"}},
        "tabular_classification": {"data": {"source": "sklearn://wine"}},
        "tabular_regression": {"data": {"source": "sklearn://diabetes"}},
        "language_model": {"data": {"source": "file:///text.txt"}},
        "fine_tuning": {
            "data": {"source": "file:///examples.jsonl"},
            "model": {"base": "file:///model"},
        },
    }
    return {"recipe": name, **defaults[name], **fields}


def divided(parallel: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A job of four workers."""
    return images(resources={"num_workers": 4}, parallel=parallel, **fields)


def refusal(document: dict[str, Any]) -> tuple[str, str]:
    """(pointer, message) of the first error."""
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate(document)
    error = caught.value.errors(include_url=False)[0]
    tags = ("all_reduce", "gossip")  # which are no fields
    place = (str(part) for part in error["loc"] if part not in tags)
    pointer = error.get("ctx", {}).get("pointer") or "/" + "/".join(place)
    return pointer, error["msg"]


def check_refusal(document: dict[str, Any], pointer: str, message: str) -> None:
    found, said = refusal(document)
    assert found == pointer
    assert message in said
