"""Every document in examples/ works as a job without changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dray import Client
from dray.views import Job, JobState
from tests.integration.harness import ROOT
from tests.marks import soak
from tests.unit.recipes.tiny_models import with_tiny_base

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
LONG = sorted((ROOT / "examples" / "parallel").glob("*.yaml"))
TUNING = sorted((ROOT / "examples" / "fine_tuning").glob("*.yaml"))
SHORT = [path for path in LONG if path.stem in ("context", "products")]
FEW = [
    path
    for path in EXAMPLES
    if path.stem in ("diabetes", "digits", "federated", "script", "sharded", "wine")
]
"""Run by `make test`: one of each kind of job, an axis, a product of the others, and one job of
fine-tuning. The unit tests run all jobs of fine-tuning without Ray."""


def with_texts(document: Path, folder: Path) -> dict[str, Any]:
    """The job document, with texts in `folder` in place of those that it names."""
    (folder / "sums.txt").write_text(" ".join(f"{n} and {n} is {2 * n}." for n in range(400)))
    spec: dict[str, Any] = yaml.safe_load(document.read_text())
    return {**spec, "data": {**spec["data"], "source": folder.as_uri()}}


def fault_of(client: Client, job: Job) -> str | None:
    """Return the error in a finished job, or None."""
    left = {artifact.path for artifact in client.artifacts(job.id)}
    if job.state is not JobState.SUCCEEDED:
        return f"it ended {job.state}: {job.reason}"
    if job.attempt != 1:
        return f"it took {job.attempt} attempts"
    if not left or ("script" not in job.spec and "model.safetensors" not in left):
        return f"its artifacts are {left or 'none'}"
    return None


@pytest.mark.parametrize("divided", [SHORT, soak(LONG)], ids=["some", "all"])
def test_the_examples_succeed_in_one_attempt_with_all_of_them_in_the_queue(
    client: Client, tmp_path: Path, divided: list[Path]
) -> None:
    examples, tuning = (EXAMPLES, TUNING) if divided is LONG else (FEW, TUNING[:1])
    submitted = {path.name: client.submit(path).id for path in examples}
    submitted |= {path.name: client.submit(with_texts(path, tmp_path)).id for path in divided}
    for path in tuning:
        folder = tmp_path / path.stem
        folder.mkdir()
        document = with_tiny_base(yaml.safe_load(path.read_text()), folder)
        submitted[path.name] = client.submit(document).id
    assert len(submitted) == len(examples) + len(divided) + len(tuning)
    ended = {name: client.wait(job_id, timeout_s=500) for name, job_id in submitted.items()}
    faults = {name: fault_of(client, job) for name, job in ended.items()}
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_every_script_under_examples_is_run_by_a_document() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    documents = "\n".join(path.read_text() for path in EXAMPLES)
    by_make = {"__init__.py", "demo.py"}
    assert all(f"examples/{name}" in documents for name in scripts - by_make)
