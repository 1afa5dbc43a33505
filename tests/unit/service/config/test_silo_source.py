"""DRAY_SILO_SOURCE: allowed on a node of a cluster, but not with the embedded Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config.settings import read_settings
from service.config.start_refusals import StartRefused


def test_a_service_with_a_ray_of_its_own_does_not_start_with_a_silos_source(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # no .env
    monkeypatch.setenv("DRAY_SILO_SOURCE", "file:///srv/patients.csv")
    with pytest.raises(StartRefused, match="DRAY_SILO_SOURCE is invalid") as refused:
        read_settings()
    assert "the embedded Ray has a single node" in str(refused.value)
    assert "patients" not in str(refused.value)
    monkeypatch.setenv("DRAY_RAY_ADDRESS", "10.0.0.1:6379")
    read_settings()
