"""From an upload with OpenAI's client to a model that answers: the recipe reads what the routes
stored, and the result is exported and loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dray
from dray.spec import JobSpec, Pretrained
from ray_workers.recipes import RECIPES
from ray_workers.training.parallel.meta_init import materialise
from service.checkpoints import base_jobs
from service.config import node_policies
from tests.unit.api.openai.conftest import ANN, BOB, Shop, jsonl
from tests.unit.api.serving import LiveServer
from tests.unit.cli.running import Cli
from tests.unit.recipes import tiny_models as tiny

pytest.importorskip(
    "openai", reason="the extra 'dev' is not installed: openai, whose client fine-tunes with dray"
)
pytest.importorskip("transformers", reason="the extra 'tuning' is not installed: transformers")


@pytest.fixture
def cli(shop: Shop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    monkeypatch.setenv("DRAY_TOKEN", ANN)
    return Cli(shop.server.url, capsys)


def test_an_uploaded_file_becomes_a_model_that_answers(
    shop: Shop, client: Any, cli: Cli, tmp_path: Path
) -> None:
    training, validation = (
        client.files.create(file=jsonl(tiny.conversations(num, seed)), purpose="fine-tune").id
        for num, seed in ((30, 1), (6, 2))
    )
    job = client.fine_tuning.jobs.create(
        model="llama-tiny", training_file=training, validation_file=validation
    )
    spec, work = train(shop.server, job.id, tmp_path / "work")
    assert (len(work.train), len(work.validation)) == (30, 6)
    assert node_policies.data_policy(shop.server.settings, spec).file_roots == (path_of(spec),)
    name = client.fine_tuning.jobs.retrieve(job.id).fine_tuned_model
    assert client.models.retrieve(name).owned_by == "ann"

    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    shown = cli("export", job.id, "--format", "safetensors", "--to", str(merged)).split()
    assert {Path(path) for path in shown} == set(merged.rglob("*"))
    cli("export", job.id, "--format", "adapter", "--to", str(adapter))
    assert {path.name for path in adapter.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    loaded = dray.load(merged)
    result = tmp_path / "work" / "result"
    prompt = [{"role": "user", "content": "the cat"}]  # with the template of the catalogue
    answer = loaded.predict(prompt, num_tokens=6)
    assert answer == dray.load(result).predict(prompt, num_tokens=6)
    logits = _logits_with_adapter(spec, adapter)
    ids = torch.tensor([[1, 5, 9, 12]])
    torch.testing.assert_close(loaded.model(input_ids=ids).logits, logits(ids))

    again = tmp_path / "again"
    cli("export", str(result), "--format", "adapter", "--to", str(again))
    assert sorted(path.name for path in again.iterdir()) == sorted(
        path.name for path in adapter.iterdir()
    )
    cli("export", str(merged), "--format", "adapter", "--to", str(again), exits=2)
    assert "all weights were trained" in cli.err
    cli("export", str(adapter), "--format", "safetensors", "--to", str(again), exits=2)
    cli("export", str(merged), "--format", "adapter", exits=2)
    cli("export", str(merged), "--to", str(again), exits=2)


def test_uploaded_files_and_results_are_previewed(
    shop: Shop, client: Any, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preview is what the job reports. It reads no weights, and only files of the caller."""
    training, validation = (
        client.files.create(file=jsonl(tiny.conversations(num, seed)), purpose="fine-tune").id
        for num, seed in ((12, 3), (4, 4))
    )
    first = client.fine_tuning.jobs.create(model="llama-tiny", training_file=training)
    train(shop.server, first.id, tmp_path / "work")
    document = {
        "recipe": "fine_tuning",
        "model": {"base": f"job://{first.id}", "adapter": "lora"},
        "method": {"name": "sft", "max_length": 40},
        "data": {"source": f"upload://{training}?validation={validation}"},
    }
    spec = JobSpec.model_validate(document)
    database = shop.server.hands.database
    files = database.read_sync(lambda session: base_jobs.files_of(session, spec))
    policy = node_policies.data_policy(shop.server.settings, spec, result=files)
    policy = replace(policy, cache_dir=str(tmp_path / "cache"))
    expected = RECIPES["fine_tuning"].build(spec, policy)
    cli("model", "register", first.id, "previewed")
    for one in files:
        if one.name.endswith(".safetensors"):
            Path(one.url.removeprefix("file://")).unlink()
    file = tmp_path / "job.json"
    file.write_text(json.dumps(document))
    assert cli("preview", str(file)).splitlines() == [*expected.about]
    assert cli.json("preview", str(file)) == expected.files["examples.json"]
    document["model"]["base"] = "model://previewed@1"  # type: ignore[index]
    file.write_text(json.dumps(document))
    assert cli("preview", str(file)).splitlines() == [*expected.about]
    monkeypatch.setenv("DRAY_TOKEN", BOB)
    cli("preview", str(file), exits=3)
    assert training in cli.err or validation in cli.err


def train(server: LiveServer, job_id: str, folder: Path) -> tuple[JobSpec, Any]:
    """Do what a rank and the loops do: build the job, take a step, and store the result, which is
    also left in `folder / "result"`. Returns the job's document and its workload."""
    attempt = server.hands.claim(job_id)
    assert attempt is not None
    spec = JobSpec.model_validate(attempt.spec)
    policy = node_policies.data_policy(server.settings, spec)
    policy = replace(policy, cache_dir=str(folder / "cache"))
    work = RECIPES["fine_tuning"].build(spec, policy)
    materialise(work.model, torch.device("cpu"), 0)
    with torch.no_grad():  # a step of training, so that the adapter is not 0
        for parameter in work.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    result = folder / "result"
    result.mkdir(parents=True)
    work.write_results(work.model, {}, 7, result)
    artifacts = [
        server.artifact(job_id, path.relative_to(result).as_posix(), path.read_bytes())
        for path in result.rglob("*")
        if path.is_file()
    ]
    server.hands.report(job_id, 1, artifacts)
    server.succeed(job_id)
    return spec, work


def path_of(spec: JobSpec) -> str:
    assert isinstance(spec.model, Pretrained)
    return spec.model.base.removeprefix("file://")


def _logits_with_adapter(spec: JobSpec, folder: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(path_of(spec))
    adapted = PeftModel.from_pretrained(base, folder).eval()
    return lambda ids: adapted(input_ids=ids).logits


def test_the_catalogue_is_listed(shop: Shop, cli: Cli) -> None:
    listed = shop.http().get("/v1/base-models").json()["items"]
    assert [one["name"] for one in listed] == ["llama-tiny", "guarded", "started"]
    assert "licence_text" not in listed[1] or listed[1]["licence_text"] is None
    assert "guarded" in cli("model", "bases")
    assert cli.json("model", "bases")[1]["must_accept"] is True
    shown = cli("model", "bases", "guarded")
    assert "Community License" in shown
    assert "Be good." in shown
    assert cli.json("model", "bases", "guarded")["licence_text"] == "Be good."
    cli("model", "bases", "none", exits=3)
    answer = shop.http().post(
        "/v1/jobs",
        json={
            "recipe": "fine_tuning",
            "model": {"base": "guarded"},
            "data": {"source": "file:///d.jsonl"},
        },
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "licence_not_accepted")
