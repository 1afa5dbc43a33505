"""A base model in an object store is fetched once, and its files have their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dray.spec import Pretrained
from ray_workers.datasets.formats.base_models import open_base
from ray_workers.datasets.sources.s3 import S3Origin
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.core.errors import DataError
from tests.object_store import ObjectStore
from tests.unit.datasets.test_s3 import cloud as cloud

FILES = {
    "config.json": json.dumps({"architectures": ["LlamaForCausalLM"]}).encode(),
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "original/params.json": b"{}",
}


def test_a_base_in_a_bucket_is_fetched_once(
    s3: ObjectStore, cloud: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[object] = []
    fetch = S3Origin.fetch
    monkeypatch.setattr(
        S3Origin, "fetch", lambda self, *rest: (fetched.append(1), fetch(self, *rest))
    )
    for name, content in FILES.items():
        s3.put(f"models/tiny/{name}", content)
    model = Pretrained(base="s3://bucket/models/tiny", credentials="lab")
    found = open_base(model, cloud, 16)
    assert {name: path.read_bytes() for name, path in found.paths.items()} == FILES
    assert found.weight_files == ["model.safetensors"]
    again = open_base(model, cloud, 16)
    assert again.sha256 == found.sha256
    assert len(fetched) == len(FILES)
    s3.put("models/tiny/model.safetensors", b"changed")
    assert open_base(model, cloud, 16).sha256 != found.sha256


def test_a_base_with_another_hash_is_refused(policy: DataPolicy, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(FILES[name])
    sha256 = open_base(Pretrained(base=tmp_path.as_uri()), policy, 16).sha256
    model = Pretrained(base=tmp_path.as_uri(), sha256=sha256)
    assert open_base(model, policy, 16).sha256 == sha256
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(DataError, match=f"but model.sha256 is {sha256}"):
        open_base(model, policy, 16)


def test_pickled_weights_in_a_bucket_are_refused(s3: ObjectStore, cloud: DataPolicy) -> None:
    for name, content in FILES.items():
        name = name.replace("model.safetensors", "pytorch_model.bin")
        s3.put(f"models/pickled/{name}", content)
    model = Pretrained(base="s3://bucket/models/pickled", credentials="lab")
    with pytest.raises(DataError, match="has only pickled weights"):
        open_base(model, cloud, 16)


def test_an_index_that_is_none_is_refused(policy: DataPolicy, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(FILES[name])
    for text in ("[]", "{}", '{"weight_map": [1]}', "{"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        base = open_base(Pretrained(base=tmp_path.as_uri()), policy, 16)
        with pytest.raises(DataError, match="is not an index of safetensors files"):
            _ = base.weight_files
