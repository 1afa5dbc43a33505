"""A lying silo can't end a job, take over all of the weight, or corrupt the job's reports."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.train.kv.connection import TensorConnection
from ray_workers.shared.contracts import RankTask
from ray_workers.training.parallel.federated.silos.collector import RoundCollector, SiloUpdate
from tests.marks import ONE_SET, SOAK
from tests.unit.training.jobs import assert_same, series, weights
from tests.unit.training.parallel.federated.silos.test_silos import document, run_silos

ROUNDS = 11
"""More than the number of consecutive steps with a non-finite loss after which a job ends."""
LIES: dict[str, dict[str, Any]] = {
    "nan": {"metrics": {"train/loss": math.nan, "val/loss": math.nan}},
    "1e308": {"metrics": {"train/loss": 1e308, "val/loss": -1e308, "x": 1.0}},
}


def lie(header: dict[str, Any], task: RankTask) -> None:
    """Make the silo south change what it states about each update."""
    if task.rank != 2:
        return
    send = TensorConnection.send

    def lying(self: TensorConnection, given: Any, *payload: torch.Tensor) -> None:
        send(self, {**given, **header} if "round" in given else given, *payload)

    TensorConnection.send = lying  # type: ignore[method-assign]


@ONE_SET
@pytest.mark.parametrize("name", list(LIES))
def test_a_silo_that_lies_does_not_end_the_job(tmp_path: Path, name: str) -> None:
    spec = document(tmp_path, rounds=ROUNDS, local_epochs=1)
    codes = run_silos(tmp_path, spec, before=partial(lie, LIES[name]))
    assert codes == [0] * 4
    losses = series(tmp_path, "train/loss")
    assert sorted(losses) == list(range(1, ROUNDS + 1))
    honest = [series(tmp_path, f"silo/{silo}/train/loss") for silo in ("north", "west")]
    for step, loss in losses.items():
        told = [one[step] for one in honest]
        assert 0.8 * min(told) <= loss <= 1.25 * max(told), (step, loss, told)
        assert math.isfinite(series(tmp_path, "silos/val/loss")[step])
    assert all(torch.isfinite(tensor).all() for tensor in weights(tmp_path).values())


@SOAK
def test_a_silo_weighs_no_more_than_the_document_allows(tmp_path: Path) -> None:
    spec = document(tmp_path, rounds=2, local_epochs=1)
    for silo in spec["federated"]["silos"]:
        silo["max_samples"] = 600
    found = []
    for samples in (2**31, 600):
        home = tmp_path / str(samples)
        home.mkdir()
        assert run_silos(home, spec, before=partial(lie, {"num_samples": samples})) == [0] * 4
        found.append(weights(home))
    assert_same(*found)


def test_an_update_that_is_refused_makes_no_quorum() -> None:
    """Otherwise a silo that immediately sends NaN could end every round before the others
    respond."""
    rules = RoundCollector(3, least=1, deadline_s=10.0)
    rules.begin(1, now=0.0)
    rules.take(1, 1, SiloUpdate(1, 1, torch.tensor([math.nan]), {}, is_refused=True))
    for silo in (0, 2):
        rules.lost(silo)
    assert rules.wait_s(11.0) > 0
    rules.take(0, 1, SiloUpdate(1, 1, torch.tensor([1.0]), {}))
    assert rules.wait_s(11.0) == 0
