"""A script that calls `train.prepare` on real workers: killed, asked to leave, and resized."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dray import Client
from dray.views import Job, JobState
from tests.integration.harness import (
    Service,
    all_metrics,
    assert_books_add_up,
    assert_promises,
    script,
    training_pids,
    wait_for_checkpoint,
    wait_for_step,
)
from tests.marks import SOAK

pytestmark = pytest.mark.ray

PROGRAM = """
import time
import torch
from torch import nn
from dray import train

train.init(seed=1, checkpoint_every_steps=20)
torch.manual_seed(1)
x = torch.randn(400, 8)
model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
loader = torch.utils.data.DataLoader(data, batch_size=40, shuffle=True)
model, optimizer, loader = train.prepare(model, optimizer, loader)
for epoch in train.epochs(20):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        train.report({"train/loss": loss})
if train.context().rank == 0:
    torch.save(model.state_dict(), "model.pt")
    train.save_artifact("model.pt")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "prepared.py"
    path.write_text(PROGRAM)
    return path


def weights_of(client: Client, job: Job, folder: Path) -> str:
    (path,) = client.download(job.id, folder)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(embedded: Service, program: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the weights when the job is left undisturbed."""
    with embedded.client as client:
        job = client.wait(client.submit(document(program)).id, timeout_s=120)
        assert job.state is JobState.SUCCEEDED, job.reason
        return weights_of(client, job, tmp_path_factory.mktemp("undisturbed"))


def document(program: Path, **changes: Any) -> dict[str, Any]:
    return script(program, resources={"num_workers": 2}, **changes)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=SOAK)])
def test_a_killed_rank_is_replaced_and_no_step_is_lost(
    embedded: Service, client: Client, program: Path, undisturbed: str, tmp_path: Path, rank: int
) -> None:
    job = client.submit(document(program))
    wait_for_step(client, job.id, 30)
    os.kill(training_pids(job.id)[rank], signal.SIGKILL)
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.attempt == 1
    assert weights_of(client, job, tmp_path) == undisturbed
    steps = all_metrics(client, job.id)["train/loss"].steps
    # A dead rank 0 may have taken one step that it had not reported.
    assert len(steps) >= 200 - (rank == 0)
    assert_books_add_up(client, job.id)
    assert_promises(embedded, client, job.id)


@SOAK
def test_a_job_that_is_asked_to_leave_goes_on_where_it_was(
    client: Client, program: Path, undisturbed: str, tmp_path: Path
) -> None:
    job = client.submit(document(program))
    wait_for_checkpoint(client, job.id, 20)
    client.preempt(job.id)
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.attempt == 2
    assert weights_of(client, job, tmp_path) == undisturbed
    assert list(all_metrics(client, job.id)["train/loss"].steps) == list(range(1, 201))


@SOAK
def test_an_elastic_script_that_is_not_prepared_says_what_to_call(
    client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "plain.py"
    path.write_text(
        "import time\nfrom dray import train\ntrain.report(1, {'a': 1})\ntime.sleep(60)\n"
    )
    job = client.submit(document(path, elastic={"min_workers": 1}, max_retries=0))
    job = client.wait(job.id, timeout_s=60)
    assert job.state is JobState.FAILED
    assert job.reason is not None
    assert "dray.train.prepare()" in job.reason.message


TWO_OPTIMIZERS = """
import time
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from dray import train

train.init(seed=1, checkpoint_every_steps=200)
torch.manual_seed(1)
generator = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizers = [torch.optim.AdamW(part.parameters(), lr=0.003) for part in (generator, critic)]
data = torch.utils.data.TensorDataset(torch.randn(400, 2) + 2)
loader = torch.utils.data.DataLoader(data, batch_size=40, shuffle=True)
_, _, loader = train.prepare([generator, critic], optimizers, loader)
for epoch in train.epochs(20):
    for (real,) in loader:
        fake = generator(torch.randn(len(real), 4))
        optimizers[1].zero_grad()
        scores, faked = critic(real), critic(fake.detach())
        (bce(scores, scores * 0 + 1) + bce(faked, faked * 0)).backward()
        optimizers[1].step()
        time.sleep(0.01)
        optimizers[0].zero_grad()
        scores = critic(fake)
        loss = bce(scores, scores * 0 + 1)
        loss.backward()
        optimizers[0].step()
        time.sleep(0.01)
        train.report({"train/loss_g": loss})
if train.context().rank == 0:
    torch.save([part.state_dict() for part in (generator, critic)], "model.pt")
    train.save_artifact("model.pt")
"""


@SOAK
def test_a_script_with_two_optimizers_loses_each_rank_in_turn_and_no_step(
    embedded: Service, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "gan.py"
    path.write_text(TWO_OPTIMIZERS)
    found = []
    for kills in ((), (0, 1), (1, 0)):
        job = client.submit(document(path))
        for number, rank in enumerate(kills):
            wait_for_step(client, job.id, 60 + 120 * number)
            os.kill(training_pids(job.id)[rank], signal.SIGKILL)
        job = client.wait(job.id, timeout_s=180)
        assert job.state is JobState.SUCCEEDED, job.reason
        assert job.attempt == 1
        recovered = [event for event in client.events(job.id) if event.code == "recovered"]
        assert len(recovered) == len(kills)
        folder = tmp_path / f"killed-{len(found)}"
        found.append(weights_of(client, job, folder))
        assert_promises(embedded, client, job.id)
    assert len(set(found)) == 1
