"""An elastic job on a real Ray changes its global batch with its size."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dray import Client
from dray.views import JobState
from tests.integration.harness import (
    Service,
    all_metrics,
    assert_promises,
    digits,
    eventually,
    wait_for_step,
)
from tests.marks import SOAK

pytestmark = [pytest.mark.ray, SOAK]

LEAST, DECLARED = 16, 64
NOISE, BATCH = "train/gradient_noise_scale", "train/global_batch_size"


def test_a_job_that_grows_goes_on_with_the_batch_that_the_policy_chose(
    embedded: Service, client: Client
) -> None:
    other = client.submit(digits(resources={"num_workers": 2}, train={"epochs": 10_000}))
    wait_for_step(client, other.id, 1)
    train = {
        "epochs": 60,
        "global_batch_size": DECLARED,
        "batch_range": [LEAST, 512],
        "measure_noise": True,
    }
    elastic = {"min_workers": 2}
    job = client.submit(digits(resources={"num_workers": 4}, elastic=elastic, train=train))
    eventually(lambda: NOISE in all_metrics(client, job.id), why="no noise was measured")
    assert client.get(job.id).world_size == 2
    client.cancel(other.id)
    eventually(lambda: client.get(job.id).world_size == 4, why="it never grew")
    (growing,) = [event for event in client.events(job.id) if event.type == "growing"]
    chosen = growing.data["batch_size"]
    assert chosen in (DECLARED // 2, DECLARED, 2 * DECLARED)
    job = client.wait(job.id, timeout_s=180)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert len(client.attempts(job.id)) == 1
    told = all_metrics(client, job.id)
    batches = told[BATCH]
    assert batches.values[0] == DECLARED
    assert batches.values[-1] == chosen
    losses = told["train/loss"].steps
    assert losses == batches.steps
    assert job.progress is not None
    assert losses[-1] == job.progress.total_steps
    in_force = dict(zip(batches.steps, batches.values, strict=True))
    for before, step in pairwise([0, *losses]):
        assert 0 < (step - before) * LEAST <= in_force[step], "no step is left out or done twice"
    assert_promises(embedded, client, job.id)
