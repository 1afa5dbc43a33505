"""Jobs that fine-tune a base model over HTTP: what is refused at submission, and what is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

CONFIG = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}


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


def test_a_base_is_not_planned(http: httpx.Client, base: Path) -> None:
    answer = http.post("/v1/plan", json=job(base))
    assert (answer.status_code, answer.json()["code"]) == (422, "not_plannable"), answer.text
    assert "base model" in answer.json()["detail"]
    document = job(base, parallel="auto", resources={"num_workers": 2})
    answer = http.post("/v1/jobs", json=document)
    assert answer.status_code == 201, answer.text
    assert answer.json()["spec"]["parallel"]["shard"] == 1
