"""Jobs that fine-tune a base model over HTTP: what is refused at submission, and what is stored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from dray.spec import JobSpec
from tests.unit.api.matrix import TOKEN
from tests.unit.api.serving import serving
from tests.unit.service.planning.tuning_documents import changed

CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}

LARGE = {
    **CONFIG,
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def job(base: Path, **fields: Any) -> dict[str, Any]:
    return {
        "recipe": "fine_tuning",
        "model": {"base": base.as_uri(), "adapter": "lora"},
        "data": {"source": "file:///examples.jsonl"},
        "resources": {"memory_bytes": "8GiB"},
        **fields,
    }


def test_a_job_is_stored_with_the_defaults_written_out(http: httpx.Client, base: Path) -> None:
    answer = http.post("/v1/jobs", json=job(base))
    assert answer.status_code == 201, answer.text
    spec = answer.json()["spec"]
    assert spec["model"]["adapter"]["rank"] == 16
    assert spec["method"]["max_length"] == 1024


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/jobs?dry_run=true"])
def test_a_base_that_is_unfit_is_refused_and_nothing_is_stored(
    http: httpx.Client, base: Path, path: str
) -> None:
    before = len(http.get("/v1/jobs").json()["items"])
    (base / "tokenizer.json").unlink()
    answer = http.post(path, json=job(base))
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_document"), answer.text
    assert answer.json()["pointer"] == "/model/base"
    assert "has no tokenizer" in answer.json()["detail"]
    assert len(http.get("/v1/jobs").json()["items"]) == before


def test_a_base_is_planned_from_its_config(http: httpx.Client, base: Path) -> None:
    """With 1.2e9 weights: adapters fit on one worker, all weights only on several."""
    (base / "config.json").write_text(json.dumps(LARGE))
    memory = {"memory_bytes_per_rank": 16 << 30}
    several = {"num_workers": 4}
    given = job(base, resources=several, train={"global_batch_size": 4})
    answer = http.post("/v1/plan", json={**given, **memory})
    assert answer.status_code == 200, answer.text
    plan = answer.json()
    assert {mesh["name"] for mesh in plan["meshes"]} == {"data 4", "data 2 x shard 2", "shard 4"}
    assert plan["chosen"] is not None
    assert plan["assumed"] == ["every row has 1,024 tokens (method.max_length)"]
    whole = {**given, "model": {"base": base.as_uri()}}
    weights = http.post("/v1/plan", json={**whole, **memory}).json()
    assert "shard" in weights["chosen"]
    (adapted,) = (one for one in plan["meshes"] if one["name"] == "data 4")
    (full,) = (one for one in weights["meshes"] if one["name"] == "data 4")
    assert full["missing_bytes"] > 0
    assert adapted["memory"]["gradients_bytes"] < full["memory"]["gradients_bytes"] / 50
    assert adapted["memory"]["parameters_bytes"] > full["memory"]["parameters_bytes"]


def test_parallel_auto_divides_a_base_that_one_worker_cannot_hold(
    http: httpx.Client, base: Path
) -> None:
    (base / "config.json").write_text(json.dumps(LARGE))
    resources = {"num_workers": 2, "memory_bytes": "12GiB"}
    train = {"global_batch_size": 2, "recompute": "full"}
    given = job(base, model={"base": base.as_uri()}, parallel="auto", train=train)
    answer = http.post("/v1/jobs", json={**given, "resources": resources})
    assert answer.status_code == 201, answer.text
    assert answer.json()["spec"]["parallel"]["shard"] == 2


def test_a_base_whose_weights_cannot_fit_is_refused(http: httpx.Client, base: Path) -> None:
    """Whatever the lengths of the examples are; the hint is a document that is accepted."""
    (base / "config.json").write_text(json.dumps(LARGE))
    given = job(base, model={"base": base.as_uri()}, resources={"memory_bytes": "12GiB"})
    answer = http.post("/v1/jobs", json=given)
    assert (answer.status_code, answer.json()["code"]) == (422, "out_of_memory"), answer.text
    assert answer.json()["hint"].startswith("it fits with ")
    assert http.post("/v1/jobs", json=job(base, resources={"memory_bytes": "12GiB"})).is_success


METHODS: dict[str, tuple[str, Any]] = {
    "dpo, all weights": ("dpo", None),
    "dpo, DoRA": ("dpo", "dora"),
    "reward": ("reward", None),
    "sft, bf16": ("sft", {"kind": "lora", "base_precision": "bf16"}),
}


@pytest.mark.parametrize("case", METHODS)
def test_every_method_is_planned_refused_and_divided(
    http: httpx.Client, base: Path, case: str
) -> None:
    """The change that a refusal names is accepted, and its plan fits."""
    (base / "config.json").write_text(json.dumps(LARGE))
    method, adapter = METHODS[case]
    given = {
        **job(base, model={"base": base.as_uri(), "adapter": adapter}),
        "method": {"name": method, "max_length": 256},
        "train": {"global_batch_size": 2, "precision": "bf16", "recompute": "full"},
    }
    given["resources"] = {"num_workers": 2}
    replicas = memory_of_replicas(http, given)
    held = memory_of_replicas(http, {**given, "method": {"name": method, "max_length": 2}})
    resources = {"num_workers": 2, "memory_bytes": int(0.8 * held)}
    refused = http.post("/v1/jobs", json={**given, "resources": resources})
    assert (refused.status_code, refused.json()["code"]) == (422, "out_of_memory"), refused.text
    spec = JobSpec.model_validate({**given, "resources": resources})
    new = changed(spec, refused.json()["hint"].removeprefix("it fits with "))
    document = new.model_dump(mode="json", exclude_defaults=True, exclude={"parallel"})
    document["parallel"] = new.parallel.model_dump(mode="json")
    answer = http.post("/v1/jobs", json=document)
    assert answer.status_code == 201, answer.text
    assert http.post("/v1/plan", json=document).json()["chosen"] is not None
    resources["memory_bytes"] = replicas - 1
    answer = http.post("/v1/jobs", json={**given, "resources": resources, "parallel": "auto"})
    assert answer.json()["spec"]["parallel"]["shard"] == 2, answer.text


def memory_of_replicas(http: httpx.Client, document: dict[str, Any]) -> int:
    answer = http.post("/v1/plan", json=document)
    assert answer.status_code == 200, answer.text
    (found,) = (one for one in answer.json()["meshes"] if one["name"] == "data 2")
    total: int = found["memory"]["total_bytes"]
    return total


@pytest.mark.parametrize("elsewhere", ["file:///nowhere/base", "s3://bucket/base"])
def test_a_base_that_the_server_cannot_read_is_not_planned(
    http: httpx.Client, base: Path, elsewhere: str
) -> None:
    model = {"base": elsewhere}
    answer = http.post("/v1/plan", json=job(base, model=model))
    assert (answer.status_code, answer.json()["code"]) == (422, "not_plannable"), answer.text
    assert f"the server can't read config.json in {elsewhere}" in answer.json()["detail"]
    document = job(base, model=model, parallel="auto", resources={"num_workers": 2})
    answer = http.post("/v1/jobs", json=document)
    assert answer.status_code == 201, answer.text
    assert answer.json()["spec"]["parallel"]["shard"] == 1


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"model_type": 3}', "[" * 100_000])
def test_a_broken_config_is_not_planned(http: httpx.Client, base: Path, text: str) -> None:
    (base / "config.json").write_text(text)
    answer = http.post("/v1/plan", json=job(base))
    assert (answer.status_code, answer.json()["code"]) == (422, "not_plannable"), answer.text


def test_a_model_of_the_catalogue_is_planned_although_jobs_may_read_no_other_folder(
    tmp_path: Path, base: Path
) -> None:
    (base / "config.json").write_text(json.dumps(LARGE))
    (tmp_path / "tokens").write_text(f"ann:{hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
    models = [
        {"name": "llama", "base": base.as_uri()},
        {"name": "guarded", "base": f"{base.as_uri()}-2", "licence": "MIT", "must_accept": True},
    ]
    file = tmp_path / "models.yaml"
    file.write_text(json.dumps({"models": models}))
    given = job(base, resources={"num_workers": 2, "memory_bytes": "12GiB"}, parallel="auto")
    given["train"] = {"global_batch_size": 2, "recompute": "full"}
    given["data"] = {"source": "s3://bucket/examples.jsonl"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(LARGE))
    options = {"tokens_file": tmp_path / "tokens", "models_file": file}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        serving(tmp_path / "home", **options) as server,
        server.client(headers=headers) as http,
    ):

        def planned(**model: Any) -> httpx.Response:
            return http.post("/v1/plan", json={**given, "model": model})

        for named in ("llama", base.as_uri()):
            answer = planned(base=named)
            assert answer.status_code == 200, answer.text
            assert answer.json()["chosen"] == "shard 2"
        forged = planned(base=other.as_uri(), catalogue="llama")
        assert forged.json()["code"] == "not_plannable"
        assert planned(base="guarded").json()["code"] == "not_plannable", "no licence is needed"
        answer = planned(base="unknown")
        assert (answer.status_code, answer.json()["pointer"]) == (422, "/model/base")
        answer = http.post("/v1/jobs", json={**given, "model": {"base": "llama"}})
        assert answer.status_code == 201, answer.text
        assert answer.json()["spec"]["parallel"]["shard"] == 2
