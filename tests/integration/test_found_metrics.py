"""A script's metrics without a line of dray in it, and a function as a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray import Client

pytestmark = pytest.mark.ray

SCRIPT = r"""
import os
from pathlib import Path

for step in range(1, 6):
    print(f"step {step} loss={1 / step}")
if os.environ["RANK"] == "0":
    folder = Path("lightning_logs/version_0")
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("step,val_loss\n10,0.5\n20,0.25\n")
"""


def test_metrics_are_found_in_output_and_files(client: Client, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code = client.upload_code(tmp_path)
    pattern = {"name": "train/loss", "pattern": r"loss=(\S+)", "step": r"step (\d+)"}
    job = client.submit(
        {
            "script": {"entrypoint": "train.py", "code": code.id},
            "metrics": [pattern],
            "resources": {"num_workers": 2},
        }
    )
    with client.attach(job) as run:
        losses = {point.step: point.value for point in run.metrics(["train/loss"])}
    assert losses == {step: 1 / step for step in range(1, 6)}
    found = client.metrics(job.id, ["val_loss"]).series["val_loss"]
    assert (list(found.steps), list(found.values)) == ([10, 20], [0.5, 0.25])


def added(numbers: list[int]) -> int:
    return sum(numbers)


def test_a_function_runs_on_every_rank_and_its_result_comes_back(client: Client) -> None:
    job = client.submit_function(added, [[1, 2, 3]], num_workers=2)
    assert client.attach(job).result() == 6
