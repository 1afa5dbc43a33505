"""A node's cache for each test, and an object store for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import s3fs

from ray_workers.contracts import DataPolicy
from tests.integration.harness import ROOT


@pytest.fixture
def policy(tmp_path: Path) -> DataPolicy:
    return DataPolicy(cache_dir=str(tmp_path / "cache"))


@dataclass(frozen=True)
class ObjectStore:
    """A server that speaks S3, with one bucket."""

    endpoint_url: str
    files: Any
    """s3fs, as its owner uses it."""
    key: str = "AKIATESTKEY"
    secret: str = "not-a-secret-of-anyone"

    def put(self, path: str, content: bytes) -> str:
        """Its URL."""
        self.files.pipe_file(f"bucket/{path}", content)
        return f"s3://bucket/{path}"

    def trust(self, num_calls: int) -> None:
        """From now on, take so many calls without looking at who signed them."""
        self._order("reset-auth", str(num_calls))

    def empty(self) -> None:
        """One bucket, and nothing in it."""
        self.trust(10**9)
        self._order("reset")
        self.files.call_s3("create_bucket", Bucket="bucket")

    def _order(self, what: str, body: str = "") -> None:
        url = f"{self.endpoint_url}/moto-api/{what}"
        kind = {"Content-Type": "text/plain"}
        request = urllib.request.Request(url, body.encode(), kind, method="POST")
        urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture(scope="session")
def _object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    log = tmp_path_factory.mktemp("s3") / "log"
    with (
        log.open("w") as said,
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.datasets.object_store"],
            cwd=ROOT,
            env={key: value for key, value in os.environ.items() if not key.startswith("AWS_")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
            key, secret = ObjectStore.key, ObjectStore.secret
            files = s3fs.S3FileSystem(
                key=key, secret=secret, endpoint_url=endpoint, use_listings_cache=False
            )
            yield ObjectStore(endpoint, files)
        finally:
            server.stdin.close()


@pytest.fixture
def s3(_object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The store with an empty bucket; this node has no identity of its own."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    _object_store.empty()
    return _object_store
