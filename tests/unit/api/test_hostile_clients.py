"""One client that lies neither ends a federated job nor spoils what the job reports."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.views import JobState
from ray_workers.training.clients.outside_client import LocalUpdate, OutsideClient
from ray_workers.training.parallel.federated.outside import update_collector
from tests.unit.api.federated_rounds import DOCUMENT, Clients, FederatedRun
from tests.unit.api.serving import LiveServer


@pytest.fixture(autouse=True)
def small_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(update_collector, "LOOK_S", 0.01)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


LIES: dict[str, dict[str, Any]] = {
    "loss": {"loss": 1e308},
    "negative loss": {"loss": -1e308},
    "loss of float32": {"loss": 3e38},
    "validation loss": {"val_loss": 1e308, "num_val_samples": 2**31},
    "validation of no samples": {"val_loss": 1.0, "num_val_samples": 0},
    "steps": {"num_steps": 2**31},
    "samples": {"num_samples": 2**31},
}
OF_LOSSES = ("train/loss", "federated/val_loss", "federated/worst_tenth_val_loss")


@pytest.mark.parametrize("lie", list(LIES))
@pytest.mark.parametrize("liars", [[2], [0, 1, 2]], ids=["one", "all"])
def test_a_client_that_lies_does_not_end_the_job(
    server: LiveServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lie: str,
    liars: list[int],
) -> None:
    whole, honest = OutsideClient.train, dict[tuple[int, int], LocalUpdate]()

    def lying(self: OutsideClient, number: int) -> LocalUpdate:
        found = honest[number, self._client] = whole(self, number)
        return found._replace(**LIES[lie]) if self._client in liars else found

    monkeypatch.setattr(OutsideClient, "train", lying)
    federated = {**DOCUMENT["federated"], "rounds": 12, "http": {"max_samples": 100}}
    job = FederatedRun(server, tmp_path, {**DOCUMENT, "federated": federated})
    clients = Clients(job, tmp_path)
    clients.join(0, 1, 2)
    job.train(monkeypatch)
    job.end()
    clients.wait()
    assert clients.states == [JobState.SUCCEEDED] * 3
    for step, metrics in job.metrics.items():
        assert all(math.isfinite(value) for value in metrics.values()), (step, metrics)
        if len(liars) > 1:
            continue
        truth = [honest[step, client] for client in range(3)]
        for name, losses in {
            "train/loss": [one.loss for one in truth],
            "federated/val_loss": [one.val_loss or 0.0 for one in truth],
        }.items():
            assert min(losses) * 0.99 <= metrics[name] <= max(losses) * 1.01, (step, name)
