"""docs/topologies.md tells the truth: its documents are taken, and it has every way."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from dray.spec import Correction, Document, Gossip, JobSpec, ParameterServer

PAGE = (Path(__file__).parents[3] / "docs" / "topologies.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
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
        assert f"`{choice}`" in PAGE
