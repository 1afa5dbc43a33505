"""Versions of models in a real MLflow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.marks import SOAK

pytestmark = SOAK
NAME = "it's Straße"


def test_a_version_is_registered_once_and_follows_its_aliases(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow")
    from service.tracking.mlflow.client import Runs

    runs = Runs(f"sqlite:///{tmp_path}/mlflow.db", tmp_path.as_uri())
    first, second = [runs.begin("digits", "run", f"job-{n}", 1000, {}) for n in range(2)]
    runs.register(first, NAME, 1, "A card.", ["best"])
    runs.register(first, NAME, 1, "Another.", ["best"])
    runs.register(second, NAME, 3, "", ["best", "x"])
    runs.register(first, NAME, 1, "Another.", [])
    runs.register(second, NAME, 3, "", ["best"])
    found = {
        one.tags["dray.version"]: (one.run_id, one.description or "")
        for one in runs._client.search_model_versions("")
    }
    assert found == {"1": (first, "Another."), "3": (second, "")}
    assert len(runs._client.search_model_versions("")) == 2
    aliases = runs._client.get_registered_model(NAME).aliases
    newest = next(v for v in runs._client.search_model_versions("") if v.run_id == second)
    assert {alias: int(version) for alias, version in aliases.items()} == {
        "best": int(newest.version)
    }
