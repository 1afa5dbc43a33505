"""Whether lower values of a metric are better, according to its name."""

from __future__ import annotations

import re

import pytest

from api.page.static_files import FOLDER
from service.domain.tracking.metric_directions import WORDS, is_minimised


@pytest.mark.parametrize(
    "name", ["loss", "val/loss", "val_loss", "trainLoss", "eval/WER", "top1.error", "l/mse2"]
)
def test_words_of_errors_are_minimised(name: str) -> None:
    assert is_minimised(name)


@pytest.mark.parametrize("name", ["val/accuracy", "lossless", "terror", "glosses", "AUC", ""])
def test_other_names_are_maximised(name: str) -> None:
    assert not is_minimised(name)


def test_the_web_page_has_the_same_words() -> None:
    text = (FOLDER / "lib" / "directions.js").read_text()
    line = next(line for line in text.splitlines() if line.startswith("const WORDS"))
    assert set(re.findall(r"'(\w+)'", line)) == WORDS
