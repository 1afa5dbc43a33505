"""A base model in an object store or on a web server is fetched once, and its files have their
names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from dray.spec import Pretrained
from dray.spec.program import base_files
from dray.train.files import store
from ray_workers.datasets.formats.base_models import open_base
from ray_workers.datasets.sources import source
from ray_workers.datasets.sources.s3 import S3Origin
from ray_workers.shared.node_needs import DataPolicy, ResultFile
from ray_workers.training.core.errors import DataError
from tests.object_store import ObjectStore
from tests.unit.datasets.test_s3 import cloud as cloud
from tests.unit.datasets.web import Answer, Web, serving

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


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(source, "FIRST_PAUSE_S", 0.001)
    with serving() as server:
        yield server


@pytest.fixture
def near(policy: DataPolicy) -> DataPolicy:
    """Allow the address of the test's own server."""
    return replace(policy, private_hosts=("127.0.0.1",))


def put(web: Web, folder: str, files: Mapping[str, bytes], **headers: str) -> str:
    """Put files on the server, and return the URL of their folder."""
    for name, content in files.items():
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        web.answers[f"{folder}/{name}"] = Answer(content, headers={"ETag": etag, **headers})
    return web.url(folder)


SHARDED = {
    **{name: FILES[name] for name in ("config.json", "tokenizer.json")},
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "one.safetensors", "b": "more/two.safetensors"}}
    ).encode(),
    "one.safetensors": b"1",
    "more/two.safetensors": b"2",
    "merges.txt": b"m",
}


def test_a_base_on_a_web_server_is_fetched_once(web: Web, near: DataPolicy) -> None:
    for files in (SHARDED, {name: FILES[name] for name in list(FILES)[:3]}):
        folder = f"/models/{len(files)}"
        model = Pretrained(base=f"{put(web, folder, files)}/")
        found = open_base(model, near, 16)
        assert {name: path.read_bytes() for name, path in found.paths.items()} == files
        asked = web.count(f"{folder}/config.json")
        assert open_base(model, near, 16).sha256 == found.sha256
        assert web.count(f"{folder}/config.json") == asked + 1, "only the headers are asked for"
        put(web, folder, {"config.json": FILES["config.json"] + b" "})
        assert open_base(model, near, 16).sha256 != found.sha256


def test_a_base_of_the_hub_is_read_at_its_commit(
    web: Web, near: DataPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a token, which is sent to the hub only."""
    commit = "0123456789abcdef" * 2 + "01234567"
    with serving() as other:
        files = {name: FILES[name] for name in ("config.json", "tokenizer.json")}
        folder = f"/some-org/a.model/resolve/{commit}"
        put(web, folder, files)
        elsewhere = other.url("/stored", "localhost")
        put(other, "", {"stored": b"weights"})
        moved = Answer(status=302, headers={"Location": elsewhere})
        web.answers[f"{folder}/model.safetensors"] = moved
        monkeypatch.setattr(base_files, "HUB", web.url(""))
        (tmp_path / "keys").mkdir(mode=0o700)
        key = tmp_path / "keys" / "hub.json"
        host = web.url("").removeprefix("http://")
        header = {"Authorization": "Bearer secret"}
        key.write_text(json.dumps({"headers": header, "hosts": [host], "plain_http": True}))
        key.chmod(0o600)
        policy = replace(
            near, credentials_dir=str(key.parent), private_hosts=("127.0.0.1", "localhost")
        )
        base = f"hf://some-org/a.model@{commit}"
        found = open_base(Pretrained(base=base, credentials="hub"), policy, 16)
        assert found.location == base
        assert found.paths["model.safetensors"].read_bytes() == b"weights"
        assert all(headers["Authorization"] == "Bearer secret" for _, headers in web.asked)
        assert other.asked
        assert not any("Authorization" in headers for _, headers in other.asked)


BROKEN: dict[str, tuple[dict[str, Answer], str]] = {
    "nothing": ({"config.json": Answer(status=404)}, "has no config.json|is a folder without"),
    "no tokenizer": ({"tokenizer.json": Answer(status=404)}, "has no tokenizer"),
    "a page for everything": ({"config.json": Answer(b"<html>")}, "is not a JSON document"),
    "a private folder": ({"config.json": Answer(status=401)}, "requires credentials"),
    "a broken index": (
        {"model.safetensors.index.json": Answer(b"{")},
        "is not an index of safetensors files",
    ),
    "an index that leads out of the folder": (
        {"model.safetensors.index.json": Answer(b'{"weight_map": {"a": "../x.safetensors"}}')},
        "names the file ../x.safetensors, which is missing",
    ),
    "an index of pickles": (
        {"model.safetensors.index.json": Answer(b'{"weight_map": {"a": "x.bin"}}')},
        "names the file x.bin, which is missing",
    ),
    "pickled weights": (
        {
            "model.safetensors.index.json": Answer(status=404),
            "pytorch_model.bin": Answer(b"x"),
            **{name: Answer(status=404) for name in ("one.safetensors", "more/two.safetensors")},
        },
        "has only pickled weights",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_unfit_base_on_a_web_server_is_refused(web: Web, near: DataPolicy, name: str) -> None:
    answers, message = BROKEN[name]
    url = put(web, "/m", SHARDED)
    put(web, "", {"x.safetensors": b"outside of the folder"})
    web.answers |= {f"/m/{file}": answer for file, answer in answers.items()}
    with pytest.raises(DataError, match=message):
        _ = open_base(Pretrained(base=url), near, 16).weight_files


def test_a_base_on_a_private_host_is_refused(web: Web, policy: DataPolicy) -> None:
    url = put(web, "/m", SHARDED)
    with pytest.raises(DataError, match=r"reading from 127\.0\.0\.1 is not allowed"):
        open_base(Pretrained(base=url), policy, 16)
    assert not web.asked


def test_a_base_that_is_too_large_for_the_cache_is_refused(web: Web, near: DataPolicy) -> None:
    url = put(web, "/m", {**SHARDED, "one.safetensors": b"1" * 5000})
    small = replace(near, cache_limit_bytes=4000)
    with pytest.raises(DataError, match=r"more than 4,000 bytes, the limit of a node's cache"):
        open_base(Pretrained(base=url), small, 16)


@pytest.mark.parametrize("is_local", [True, False])
def test_the_result_of_another_job_is_a_base(
    policy: DataPolicy, tmp_path: Path, is_local: bool
) -> None:
    storage = tmp_path.as_uri() if is_local else f"memory://{tmp_path.name}"
    written = {**FILES, "README.md": b"card"}
    results = []
    for name, content in written.items():
        path = tmp_path / "artifact" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        size, sha256 = store(path, f"{storage}/{name}")
        results.append(ResultFile(name, f"{storage}/{name}", size, sha256))
    model = Pretrained(base="job://job-1a")
    allowed = replace(policy, result=tuple(results), file_roots=())
    found = open_base(model, allowed, 16)
    assert {name: path.read_bytes() for name, path in found.paths.items()} == FILES
    assert open_base(model, allowed, 16).sha256 == found.sha256
    with pytest.raises(DataError, match=r"job://job-1a: has no result: the job does not exist"):
        open_base(model, policy, 16)
    if is_local:
        (tmp_path / "model.safetensors").unlink()
        emptied = replace(allowed, cache_dir=str(tmp_path / "other"))
        with pytest.raises(DataError, match=r"model.safetensors: can't be read: No such file"):
            open_base(model, emptied, 16)
