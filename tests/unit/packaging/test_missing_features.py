"""README's list of missing features is true: each document in it is refused for that reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dray.documents import parse_yaml, validate
from dray.errors import SpecError

README = (Path(__file__).resolve().parents[3] / "README.md").read_text()
DATA = {"source": "file:///text.txt"}


def rows() -> list[dict[str, Any]]:
    section = README.split("## What this version does not have", 1)[1].split("\n## ", 1)[0]
    found = re.findall(r"^\| .+ \| `(\{.+\})` \|$", section, re.MULTILINE)
    return [parse_yaml(text, source="README") for text in found]


def test_the_table_is_read() -> None:
    assert len(rows()) >= 4


@pytest.mark.parametrize("document", rows(), ids=str)
def test_what_readme_calls_missing_is_refused_by_the_field_that_asks_for_it(
    document: dict[str, Any],
) -> None:
    runs_script = "script" in document
    whole = document if runs_script else {"data": DATA, **document}
    with pytest.raises(SpecError) as refused:
        validate(whole)
    asked = [*document][-1]  # the last field of a row asks for what is missing
    assert str(refused.value.pointer).startswith(f"/{asked}"), refused.value
    validate({name: value for name, value in whole.items() if name != asked})


def test_a_language_model_is_trained_on_from_another_jobs_checkpoint() -> None:
    """The row about checkpoints states that those of other jobs are accepted."""
    begun = {"recipe": "language_model", "data": DATA, "init_from": {"job": "job-0abc"}}
    validate(begun)
