"""A node's cache for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_workers.contracts import DataPolicy


@pytest.fixture
def policy(tmp_path: Path) -> DataPolicy:
    return DataPolicy(cache_dir=str(tmp_path / "cache"))
