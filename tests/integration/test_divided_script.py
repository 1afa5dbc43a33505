"""A script whose model `train.prepare` shards, on real workers: a killed rank ends the attempt, and
the next attempt resumes from the newest checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dray import Client
from dray.views import JobState
from tests.integration.harness import (
    Service,
    all_metrics,
    assert_promises,
    script,
    training_pids,
    wait_for_checkpoint,
)

pytestmark = pytest.mark.ray

PROGRAM = """
import time
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from dray import train

train.init(seed=1, checkpoint_every_steps=10)
torch.manual_seed(1)
x = torch.randn(400, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=40, shuffle=True)
model, optimizer, loader = train.prepare(model, optimizer, loader, blocks="[02]")
assert all(isinstance(p, DTensor) for p in model.parameters())
for epoch in train.epochs(8):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        train.report({"train/loss": loss})
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sharded_script_resumes_from_its_checkpoint_when_a_rank_is_killed(
    embedded: Service, client: Client, tmp_path: Path, rank: int
) -> None:
    program = tmp_path / "sharded.py"
    program.write_text(PROGRAM)
    document = script(program, resources={"num_workers": 2}, parallel={"shard": 2})
    job = client.submit(document)
    wait_for_checkpoint(client, job.id, 10)
    os.kill(training_pids(job.id)[rank], signal.SIGKILL)
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.attempt == 2
    assert list(all_metrics(client, job.id)["train/loss"].steps) == list(range(1, 81))
    assert_promises(embedded, client, job.id)
