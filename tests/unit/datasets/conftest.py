"""A node's cache for each test, and an object store for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_workers.shared.node_needs import DataPolicy
from tests.object_store import ObjectStore, serving_s3


@pytest.fixture
def policy(tmp_path: Path) -> DataPolicy:
    return DataPolicy.open(str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def _object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with serving_s3(tmp_path_factory.mktemp("s3")) as store:
        yield store


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
