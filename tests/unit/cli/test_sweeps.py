"""Sweeps on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.cli.exits import Exit
from ray_workers.shared.contracts import Cause
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import metrics

DOCUMENT = """
name: {name}
recipe: image_classification
sweep:
  metric: val/loss
  sampler: grid
  max_running: 2
  parameters:
    train.optimizer.lr: [0.1, 0.01, 0.001]
    train.schedule.name: [constant]
  early_stopping: {{min_steps: 10, eta: 2}}
"""


@pytest.fixture
def document(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    path = tmp_path / "sweep.yaml"
    path.write_text(DOCUMENT.format(name=request.node.name))
    return str(path)


def trial_ids(cli: Cli, sweep_id: str) -> list[str]:
    trials = cli.json("sweep", "show", sweep_id, "--by-index")["trials"]
    return [trial["job_id"] for trial in trials]


def test_a_sweep_is_submitted_shown_and_cancelled(cli: Cli, document: str) -> None:
    said = cli("sweep", "submit", document)
    sweep_id = said.split()[0]
    assert said == f"{sweep_id} 3 trials: 3 QUEUED\n"
    lines = cli("sweep", "show", sweep_id[:18]).splitlines()
    assert lines[1] == "compared by the best val/loss (lower is better); sampler: grid"
    headings = lines[2].split()
    assert headings[:4] == ["TRIAL", "BEST", "STATE", "VALUE"]
    assert headings[5:7] == ["train.optimizer.lr", "train.schedule.name"]
    assert [line.split()[0] for line in lines[3:]] == ["0", "1", "2"]
    assert "3 trials, 2 at a time" in cli("ls")
    assert "VARIANT" not in cli("ls")
    each = cli("ls", "--array", sweep_id)
    assert each.splitlines()[0].split()[:3] == ["ID", "NAME", "VARIANT"]
    assert [f"#{n} lr {lr}" in each for n, lr in enumerate((0.1, 0.01, 0.001))] == [True] * 3
    assert "#1 lr 0.01" in cli("get", f"{sweep_id}/1").splitlines()[2]
    assert "#2 lr 0.001" in cli("compare", f"{sweep_id}/1", f"{sweep_id}/2")
    name = cli.json("get", f"{sweep_id}/0")["name"]
    assert cli("sweep", "cancel", name) == f"{sweep_id} 3 trials: 3 CANCELLED\n"
    assert cli("wait", sweep_id, exits=Exit.JOB_ENDED_BADLY)


def test_the_best_comes_first_and_early_stops_are_no_bad_end(
    cli: Cli, server: LiveServer, document: str
) -> None:
    sweep_id = cli("sweep", "submit", document).split()[0]
    for job_id, loss in zip(trial_ids(cli, sweep_id), (2.0, 3.0, 1.0), strict=True):
        server.train(job_id, metrics(10, {"val/loss": loss}))
        server.hands.end(job_id, 1, Cause.STOPPED if loss == 3.0 else Cause.SUCCEEDED)
    said = cli("wait", sweep_id)
    assert said == f"{sweep_id} 3 trials: 2 SUCCEEDED, 1 CANCELLED (1 stopped early)\n"
    best, second, third = (line.split() for line in cli("sweep", "show", sweep_id).splitlines()[3:])
    assert best[:5] == ["2", "best", "SUCCEEDED", "1", "10"]
    assert second[:5] == ["0", "-", "SUCCEEDED", "2", "10"]
    assert third[:5] == ["1", "-", "CANCELLED", "3", "10"]
    assert "stopped early at step 10" in " ".join(third)
    found = cli.json("sweep", "show", sweep_id)
    assert found["best"]["index"] == found["trials"][0]["index"] == 2


def test_a_document_without_a_sweep_is_told_so(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("recipe: image_classification\n")
    cli("sweep", "submit", str(path), exits=Exit.USAGE)
    assert "job.yaml has no sweep (at /sweep)" in cli.err
    cli("sweep", "show", "array-none", exits=Exit.REFUSED)


def test_a_dry_run_counts_the_trials(cli: Cli, document: str) -> None:
    assert "describes a sweep of 3 trials" in cli("submit", document, "--dry-run")
    cli("submit", document, "--watch", exits=Exit.USAGE)
    assert "--watch shows only a single job" in cli.err


def test_the_importance_of_parameters_is_shown(
    cli: Cli, server: LiveServer, tmp_path: Path
) -> None:
    path = tmp_path / "many.yaml"
    rates = [round(0.01 * n, 2) for n in range(1, 22)]
    path.write_text(
        DOCUMENT.format(name="importance").replace("[0.1, 0.01, 0.001]", str(rates))
        + "max_retries: 0\n"
    )
    sweep_id = cli("sweep", "submit", str(path)).split()[0]
    for n, job_id in enumerate(trial_ids(cli, sweep_id)):
        server.hands.claim(job_id)
        server.hands.report(job_id, 1, [metrics(5, {"val/loss": n / 10, "late": 1.0})])
        server.hands.end(job_id, 1, Cause.SUCCEEDED if n else Cause.USER_ERROR)
    lines = cli("sweep", "importance", "importance").splitlines()
    assert lines[0] == "best:val/loss of 20 runs; left out: 1 failed"
    assert lines[1].startswith("the forest explains ")
    assert lines[2].split()[:2] == ["PARAMETER", "IMPORTANCE"]
    assert lines[3].split()[0] == "train.optimizer.lr"
    found = cli.json("importance", "val/loss", "--array", sweep_id)
    assert found["parameters"][0]["name"] == "train.optimizer.lr"
    assert found["parameters"][0]["importance"] > 0.5
    few = cli("importance", "val/loss", "--where", "val/loss > 1.5")
    assert "no importances: too few runs: " in few
    same = cli("sweep", "importance", sweep_id, "--metric", "late")
    assert "all runs have the same value of late" in same
