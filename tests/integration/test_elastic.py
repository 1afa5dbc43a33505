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
    job = client.wait(job.id, timeout_s=180)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert len(client.attempts(job.id)) == 1
    told = all_metrics(client, job.id)
    batches = told[BATCH]
    changes = [e for e in client.events(job.id) if e.type in ("growing", "changing_batch")]
    assert "growing" in [change.type for change in changes]
    chosen = [DECLARED, *(change.data["batch_size"] for change in changes)]
    assert all(later in (size // 2, size, 2 * size) for size, later in pairwise(chosen))
    had = [size for at, size in enumerate(batches.values) if [size] != batches.values[at - 1 : at]]
    wanted = [size for at, size in enumerate(chosen) if [size] != chosen[at - 1 : at]]
    assert had == wanted[: len(had)], "the last one may come when the training is over"
    assert len(had) >= len(wanted) - 1
    losses = told["train/loss"].steps
    assert losses == batches.steps
    assert job.progress is not None
    assert losses[-1] == job.progress.total_steps
    in_force = dict(zip(batches.steps, batches.values, strict=True))
    for before, step in pairwise([0, *losses]):
        assert 0 < (step - before) * LEAST <= in_force[step], "no step is left out or done twice"
    assert_promises(embedded, client, job.id)
