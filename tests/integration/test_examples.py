"""Every document under examples/ is a job that works as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dray import Client
from dray.views import JobState
from tests.integration.harness import ROOT

pytestmark = pytest.mark.ray

EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
PARALLEL = sorted((ROOT / "examples" / "parallel").glob("*.yaml"))


@pytest.mark.parametrize("document", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_submitted_and_succeeds(client: Client, document: Path) -> None:
    job = client.wait(client.submit(document).id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.attempt == 1, "it had to be tried again"
    assert client.artifacts(job.id), "it leaves no result"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What stands for the folder of texts that the documents name."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "sums.txt").write_text(" ".join(f"{n} and {n} is {2 * n}." for n in range(400)))
    return folder.as_uri()


@pytest.mark.parametrize("document", PARALLEL, ids=lambda path: path.name)
def test_a_divided_model_is_trained_as_its_document_says(
    client: Client, document: Path, texts: str
) -> None:
    spec = yaml.safe_load(document.read_text())
    job = client.submit({**spec, "data": {**spec["data"], "source": texts}})
    job = client.wait(job.id, timeout_s=120)
    assert job.state is JobState.SUCCEEDED, job.reason
    assert job.attempt == 1, "it had to be tried again"
    assert "model.safetensors" in {artifact.path for artifact in client.artifacts(job.id)}


def test_every_script_under_examples_is_run_by_a_document() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    documents = "\n".join(path.read_text() for path in EXAMPLES)
    by_make = {"__init__.py", "demo.py"}
    assert all(f"examples/{name}" in documents for name in scripts - by_make)
