"""Objects from a server that speaks S3: sources, credentials, and the storage of results."""

from __future__ import annotations

import hashlib
import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
import s3fs
import torch

from dray.spec import Data
from dray.train import files
from dray.train.checkpoints import CheckpointRef
from ray_workers.datasets import open_images, open_table, open_text
from ray_workers.datasets.sources import source
from ray_workers.datasets.sources.s3 import S3Origin
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.checkpoint import checkpoint_files, direct_io
from ray_workers.training.checkpoint.checkpoint_files import SkippedCheckpoint
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.core.errors import (
    BrokenCheckpointError,
    DataError,
    SourceUnavailableError,
)
from service.domain.errors import StorageUnavailable
from service.storage.storage import Storage
from tests.object_store import ObjectStore
from tests.unit.datasets.test_images import TWO
from tests.unit.training.checkpoint.test_pieces import FILES, commit, halves

CSV = b"x,y\n1,a\n2,b\n3,a\n"


@pytest.fixture
def cloud(s3: ObjectStore, policy: DataPolicy, tmp_path: Path) -> DataPolicy:
    """This node may read the store with the credentials `lab`."""
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "lab.json").write_text(json.dumps({"key": s3.key, "secret": s3.secret}))
    (folder / "lab.json").chmod(0o600)
    return replace(policy, s3_endpoint_url=s3.endpoint_url, credentials_dir=str(folder))


def read(url: str, policy: DataPolicy, **options: Any) -> Any:
    data = Data(source=url, format="csv", target="y", **{"credentials": "lab", **options})
    return open_table(data, policy, classifies=True)


def test_an_object_is_fetched_once_while_it_stays_the_same(
    s3: ObjectStore, cloud: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []
    fetch = S3Origin.fetch
    monkeypatch.setattr(
        S3Origin, "fetch", lambda self, *rest: (fetched.append(1), fetch(self, *rest))
    )
    url = s3.put("t.csv", CSV)
    sha256 = hashlib.sha256(CSV).hexdigest()
    first = read(url, cloud, size_bytes=len(CSV), sha256=sha256)
    assert first.target.tolist() == [0, 1, 0]
    assert read(url, cloud).fingerprint == first.fingerprint
    assert len(fetched) == 1
    s3.put("t.csv", CSV + b"4,b\n")
    assert len(read(url, cloud).target) == 4
    assert len(fetched) == 2
    with pytest.raises(DataError, match=f"but data.sha256 is {sha256}"):
        read(url, cloud, sha256=sha256)


def test_an_object_of_many_pieces(
    s3: ObjectStore, cloud: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_workers.datasets.sources.s3.PIECE_BYTES", 1000)
    text = b"".join(b"line %d\n" % number for number in range(2000))
    data = Data(source=s3.put("a.txt", text), credentials="lab")
    assert bytes(open_text(data, cloud, None).ids) == text


def test_a_prefix_is_a_folder(s3: ObjectStore, cloud: DataPolicy) -> None:
    for name, content in TWO.items():
        s3.put(f"sets/pets/{name}", content)
    s3.put("sets/pets/cat/", b"")
    s3.put("sets/pets/notes.md", b"x")
    images = open_images(Data(source="s3://bucket/sets/pets", credentials="lab"), cloud)
    assert images.classes == ("cat", "dog")
    assert images.pixels[:, 0, 0, 0].tolist() == [10, 20, 30]
    s3.put("sets/pets/dog/2.png", b"broken")
    with pytest.raises(
        DataError, match=r"s3://bucket/sets/pets/dog/2\.png: is not a readable image"
    ):
        open_images(Data(source="s3://bucket/sets/pets/", credentials="lab"), cloud)


def test_a_folder_of_very_many_objects_takes_few_descriptors(
    s3: ObjectStore, cloud: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(60):
        s3.put(f"many/{number % 2}/{number}.png", TWO["cat/1.png"])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 45, before[1]))
    try:
        images = open_images(Data(source="s3://bucket/many", credentials="lab"), cloud)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(images.labels) == 60
    (kept,) = Path(cloud.cache_dir or "", "objects").iterdir()
    assert len(list(kept.iterdir())) == 60


@pytest.mark.parametrize("url", ["s3://bucket/none.csv", "s3://no-such-bucket/t.csv"])
def test_what_is_not_there(url: str, s3: ObjectStore, cloud: DataPolicy) -> None:
    with pytest.raises(DataError, match="this object, folder or bucket does not exist"):
        read(url, cloud)


def test_a_folder_where_a_file_is_meant(s3: ObjectStore, cloud: DataPolicy) -> None:
    s3.put("set/t.csv", CSV)
    with pytest.raises(DataError, match="is a folder, but this format requires a single file"):
        read("s3://bucket/set", cloud)


def test_a_node_without_an_identity_reports_it(s3: ObjectStore, cloud: DataPolicy) -> None:
    with pytest.raises(DataError, match="this node has no credentials for S3"):
        read(s3.put("t.csv", CSV), cloud, credentials=None)


def test_the_nodes_own_identity_is_used_without_credentials(
    s3: ObjectStore, cloud: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    assert len(read(s3.put("t.csv", CSV), cloud, credentials=None).target) == 3


def test_credentials_that_s3_refuses_show_up_nowhere(
    s3: ObjectStore, cloud: DataPolicy, capfd: pytest.CaptureFixture[str]
) -> None:
    url = s3.put("t.csv", CSV)
    s3.trust(0)
    with pytest.raises(
        DataError, match=r"S3 (denies access with these|does not know the)"
    ) as raised:
        read(url, cloud)
    assert raised.value.__suppress_context__
    shown = "".join((*capfd.readouterr(), str(raised.value)))
    kept = b"".join(
        path.read_bytes() for path in Path(cloud.cache_dir or "").rglob("*") if path.is_file()
    )
    for secret in (s3.key, s3.secret):
        assert secret not in shown
        assert secret.encode() not in kept


def test_a_store_that_does_not_answer_is_asked_again_and_then_given_up(
    cloud: DataPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "FIRST_PAUSE_S", 0.001)
    nowhere = replace(cloud, s3_endpoint_url="http://127.0.0.1:9")
    with pytest.raises(SourceUnavailableError, match=r"the transfer failed .*; tried 4 times"):
        read("s3://bucket/t.csv", nowhere)


@pytest.fixture
def results(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A storage URL, reached like from the service and the ranks: by their environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret)
    s3fs.S3FileSystem.clear_instance_cache()  # it may remember another environment
    yield "s3://bucket/dray"
    s3fs.S3FileSystem.clear_instance_cache()


def test_the_services_storage_on_s3(results: str) -> None:
    store = Storage(results)
    assert store.folder is None
    store.write_bytes("jobs/a/log", b"0123456789")
    assert store.read_bytes("jobs/a/log") == b"0123456789"
    assert store.read_bytes("jobs/a/log", 3, 5) == b"34"
    assert store.read_bytes("jobs/a/log", 7) == b"789"
    assert store.size_bytes("jobs/a/log") == 10
    store.write_bytes("jobs/a/log", b"again")
    assert store.read_bytes("jobs/a/log") == b"again"
    store.write_bytes("jobs/ab/log", b"stays")
    store.delete_tree("jobs/a")
    store.delete_tree("jobs/a")
    with pytest.raises(FileNotFoundError):
        store.read_bytes("jobs/a/log")
    with pytest.raises(FileNotFoundError):
        store.size_bytes("jobs/a/log")
    assert store.read_bytes("jobs/ab/log") == b"stays"
    assert store.key_of(f"{results}/jobs/ab/log") == "jobs/ab/log"


def test_the_ranks_storage_on_s3(results: str) -> None:
    url = f"{results}/artifacts/a.bin"
    sha256 = direct_io.write_buffer(url, memoryview(b"content and more"), 7)
    assert sha256 == hashlib.sha256(b"content").hexdigest()
    assert files.read(url) == b"content"
    files.remove_file(url)
    files.remove_file(url)
    with pytest.raises(FileNotFoundError):
        files.read(url)


def test_checkpoints_on_s3(results: str) -> None:
    state = {"weight": torch.arange(5.0)}
    saved = checkpoint_files.save(
        f"{results}/c", CheckpointMetadata(3, {"val/loss": 1.0}, {}), state
    )
    ref = CheckpointRef(saved.url, saved.step, saved.manifest_sha256)
    loaded = checkpoint_files.load(ref)
    assert loaded.saved == saved
    assert torch.equal(loaded.state["weight"], state["weight"])
    direct_io.write_buffer(f"{saved.url}/{checkpoint_files.TENSORS}", memoryview(b"x" * 100), 100)
    (verdict,) = checkpoint_files.load_each([ref])
    assert isinstance(verdict, SkippedCheckpoint)
    files.remove_folder(saved.url)
    with pytest.raises(BrokenCheckpointError, match="cannot be read"):
        checkpoint_files.load(ref)


def test_checkpoints_that_several_ranks_write_on_s3(
    results: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second save replaces the first, and leaves none of its files; only slices are read."""
    commit(f"{results}/c", 3, [*halves(1.0), {"c": torch.ones(2)}])
    ref = commit(f"{results}/c", 3, halves(2.0))
    filesystem, folder = fsspec.core.url_to_fs(ref.url)
    assert sorted(name.rpartition("/")[2] for name in filesystem.ls(folder)) == sorted(FILES)
    loaded = [checkpoint_files.load(ref, number=rank, num_ranks=2) for rank in range(2)]
    expected = torch.full((6, 4), 2.0) + torch.arange(24.0).view(6, 4)
    read: list[int] = []
    read_range = direct_io.read_range
    monkeypatch.setattr(direct_io, "read_range", lambda *of: read.append(of[2]) or read_range(*of))
    assert torch.equal(loaded[0].state["model"]["w"][3:5].clone(), expected[3:5])
    assert sum(read) == 2 * 4 * 4
    assert checkpoint_files.committed(f"{results}/c") == [loaded[1].saved]
    name = f"{ref.url}/{FILES[1]}"
    content = bytearray(files.read(name))
    content[-1] ^= 1
    direct_io.write_buffer(name, memoryview(content), len(content))
    verdicts = [
        next(checkpoint_files.load_each([ref], number=rank, num_ranks=2)) for rank in range(2)
    ]
    assert [isinstance(one, SkippedCheckpoint) for one in verdicts] == [False, True]
    direct_io.write_buffer(name, memoryview(content), len(content) - 1)
    verdicts = list(checkpoint_files.load_each([ref]))
    assert isinstance(verdicts[0], SkippedCheckpoint)
    assert f"{len(content) - 1} bytes instead of {len(content)}" in verdicts[0].why
    files.remove_file(f"{ref.url}/manifest.json")
    checkpoint_files.drop_unfinished(f"{results}/c")
    assert direct_io.folders(f"{results}/c") == []


def test_what_another_process_left_is_deleted_too(results: str, s3: ObjectStore) -> None:
    """A listing that was cached before it was written would miss it."""
    store = Storage(results)
    store.write_bytes("jobs/a/log", b"x")
    store.delete_tree("jobs/b")
    files.remove_folder(f"{results}/jobs/b")
    s3.put("dray/jobs/a/attempts/1/checkpoints/state.pt", b"x" * 10)
    s3.put("dray/jobs/b/attempts/1/checkpoints/state.pt", b"x" * 10)
    assert store.size_bytes("jobs/a/attempts/1/checkpoints/state.pt") == 10
    store.delete_tree("jobs/a")
    files.remove_folder(f"{results}/jobs/b")
    assert s3.files.find("bucket/dray", refresh=True) == []


def test_storage_that_can_not_be_reached_is_unavailable(
    results: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    store = Storage(results)
    for act in (
        lambda: store.read_bytes("a/b"),
        lambda: store.write_bytes("a/b", b"x"),
        lambda: store.size_bytes("a/b"),
        lambda: store.delete_tree("a"),
    ):
        with pytest.raises(StorageUnavailable, match="the object store failed"):
            act()
