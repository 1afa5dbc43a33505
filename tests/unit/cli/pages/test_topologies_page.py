"""The pages about synchronized copies are correct: their documents are valid, all strategies are
included, their pictures are drawn by a program, and their figures are those of the results."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from benchmarks.topologies.page import with_figures
from dray.spec import Correction, Document, Gossip, JobSpec, ParameterServer

DOCS = Path(__file__).parents[4] / "docs"
GUIDES = "".join(
    (DOCS / "guides" / f"{name}.md").read_text()
    for name in ("topologies", "gossip", "parameter-servers")
)
COSTS = (DOCS / "explanation" / "sync-costs.md").read_text()
PICTURES = DOCS / "pictures" / "topologies"


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", GUIDES, re.DOTALL))
def test_each_block_is_part_of_a_document(block: str) -> None:
    part: dict[str, Any] = yaml.safe_load(block)
    base = {"recipe": "image_classification", "resources": {"num_workers": 4}}
    JobSpec.model_validate(base | {"data": {"source": "sklearn://digits"}} | part)


@pytest.mark.parametrize(
    ("kind", "field"),
    [(Gossip, "mode"), (Gossip, "graph"), (ParameterServer, "mode"), (Correction, "name")],
)
def test_it_explains_every_choice(kind: type[Document], field: str) -> None:
    for choice in get_args(kind.model_fields[field].annotation):
        assert f"`{choice}`" in GUIDES


def test_the_pictures_are_drawn_by_the_program_beside_them() -> None:
    draw = runpy.run_path(str(PICTURES / "draw.py"))
    drawn = {f"{name}.svg": draw["picture"](way) for name, way in draw["WAYS"].items()}
    assert {path.name: path.read_text() for path in PICTURES.glob("*.svg")} == drawn
    assert sorted(re.findall(r"\(\.\./pictures/topologies/(\w+\.svg)\)", GUIDES)) == sorted(drawn)


def test_its_figures_are_those_of_the_last_run() -> None:
    assert with_figures(COSTS) == COSTS, "run python -m benchmarks.topologies.page"
