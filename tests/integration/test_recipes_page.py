"""The tables in docs/guides/recipes.md are complete, and its commands work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from dray.spec import RECIPES, Optimizer, Schedule, Train
from tests.integration.harness import ROOT, Service
from tests.integration.tour import blocks_of, run_tour
from tests.marks import SOAK

PAGE = (ROOT / "docs" / "guides" / "recipes.md").read_text()
TOUR_TAKES_S = 270


@SOAK
@pytest.mark.ray
def test_every_command_does_what_the_page_says(embedded: Service, tmp_path: Path) -> None:
    _, predicted, exported, _, segmented, trained, generated = run_tour(
        embedded, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S
    )
    assert re.search(r"^a wine of class_[012]$", predicted, flags=re.MULTILINE)
    assert exported.strip() == ""
    assert (tmp_path / "wine.onnx").stat().st_size > 0
    progress = re.search(r"between 25 and 346: (\d+)", predicted)
    assert progress
    assert 25 <= int(progress[1]) <= 346
    shares = dict(re.findall(r"^(\w+): (\d+)% of the pixels$", segmented, flags=re.MULTILINE))
    assert shares.keys() == {"background", "cell", "nucleus"}
    assert int(shares["background"]) > int(shares["cell"]) > int(shares["nucleus"]) > 0
    assert "val/perplexity" in trained
    assert generated.startswith("Beautiful is better than ")


def test_the_table_of_recipes_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, flags=re.MULTILINE)
    rows = [row for row in rows if row[0] in RECIPES]
    assert {row[0] for row in rows} == set(RECIPES)
    for name, models, reads, metrics in rows:
        options = RECIPES[name]
        assert tuple(re.findall(r"`(\w+)`", models)) == options.models
        assert {f"val/{one}" for one in re.findall(r"`(\w+)`", metrics)} == set(options.metrics)
        assert all(one in reads for one in options.sklearn_sets)


def test_the_table_of_options_names_every_field_and_choice() -> None:
    told = set(re.findall(r"`(\w+)`", PAGE.split("## Training options")[1]))
    assert set(Train.model_fields) <= told
    for part in (Optimizer, Schedule):
        assert set(get_args(part.model_fields["name"].annotation)) <= told
    assert set(get_args(Train.model_fields["precision"].annotation)) <= told
