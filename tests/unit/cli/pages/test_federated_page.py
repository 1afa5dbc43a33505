"""The pages about federated learning are correct: their documents are valid, and their metrics are
reported."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from dray.spec import RECIPES, JobSpec
from ray_workers.training.parallel.federated.aggregation.update_checks import (
    Verdict,
    reason,
)

GUIDES = Path(__file__).parents[4] / "docs" / "guides"
PAGE = "".join(
    (GUIDES / f"{name}.md").read_text()
    for name in ("federated", "secure-aggregation", "silos", "federated-clients")
)


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_each_block_is_part_of_a_document(block: str) -> None:
    spec = JobSpec.model_validate({"recipe": "image_classification", **yaml.safe_load(block)})
    assert spec.federated is not None


def test_what_it_says_of_refused_updates_and_the_worst_clients_is_so() -> None:
    assert reason(Verdict.NOT_FINITE, 0.0, 0.0) in PAGE
    for name, options in RECIPES.items():
        more = set(options.client_metrics) - set(options.metrics)
        assert more <= set(re.findall(r"`(val/\w+)`", PAGE)), name
