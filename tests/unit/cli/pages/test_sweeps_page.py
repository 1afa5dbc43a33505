"""docs/guides/sweeps.md is correct: its blocks are run on a server, and a test trains the
trials."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import select

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.db.models import JobRow
from tests.integration.tour import blocks_of, run_tour
from tests.marks import SOAK
from tests.unit.api.serving import LiveServer, serving
from tests.unit.service.helpers import metrics

PAGE = (Path(__file__).parents[4] / "docs" / "guides" / "sweeps.md").read_text()
TOUR_TAKES_S = 200
LOOK_S = 0.02
STEPS_OF_AN_EPOCH = 23
EPOCHS = 12


@contextmanager
def training(server: LiveServer, *names: str) -> Iterator[None]:
    """Train waiting jobs with these names one after another. Their fake accuracy has its maximum at
    a learning rate of 0.01."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(LOOK_S):
            for job_id, spec in waiting(server, names):
                train(server, job_id, spec["train"]["optimizer"]["lr"])

    trainer = threading.Thread(target=work)
    trainer.start()
    try:
        yield
    finally:
        over.set()
        trainer.join()


def waiting(server: LiveServer, names: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    query = select(JobRow.id, JobRow.spec).where(
        JobRow.state == JobState.QUEUED, JobRow.name.in_(names)
    )
    return server.hands.database.read_sync(
        lambda s: [(row.id, row.spec) for row in s.execute(query.order_by(JobRow.number))]
    )


def train(server: LiveServer, job_id: str, lr: float) -> None:
    assert server.hands.claim(job_id) is not None
    for epoch in range(1, EPOCHS + 1):
        loss = (math.log10(lr) + 2) ** 2 + 1 / epoch
        values = {"val/accuracy": 1 / (1 + loss), "val/loss": loss}
        server.hands.report(job_id, 1, [metrics(epoch * STEPS_OF_AN_EPOCH, values)])
        if server.state_of(job_id) is JobState.CANCELLING:
            server.hands.end(job_id, 1, Cause.STOPPED)
            return
    server.succeed(job_id)


@SOAK
def test_every_block_does_what_the_page_says(tmp_path: Path) -> None:
    with serving(tmp_path / "home") as server, training(server, "digits-sweep", "two-rates"):
        said = run_tour(server, tmp_path, blocks_of(PAGE), takes_s=TOUR_TAKES_S)
    shown, again, by_sdk, cancelled, refused = said
    assert re.search(
        r"^array-\w+ 12 trials: \d+ SUCCEEDED, \d+ CANCELLED \(\d+ stopped early\)$",
        shown,
        flags=re.MULTILINE,
    )
    assert "compared by the best val/accuracy (higher is better); sampler: random" in shown
    (best,) = re.findall(r"^\d+ +best +SUCCEEDED +0\.\d+", shown, flags=re.MULTILINE)
    assert best in shown.splitlines()[4]
    assert "trials that reached this step earlier had a better val/accuracy than 0." in shown
    assert " QUEUED: " in again
    assert "best {'train.optimizer.lr': 0.01} 0.08333" in by_sdk
    assert by_sdk.endswith(
        "0 SUCCEEDED 0.08333333333333333 True\n1 SUCCEEDED 1.0833333333333333 False\n"
    )
    assert " 3 trials: 3 CANCELLED" in cancelled
    assert "is missing: name the metric by which trials are compared" in refused
    assert "there is no field 'lr' (at /sweep/parameters/train.lr)" in refused
    assert "hint: did you mean '/train/optimizer/lr'?" in refused
