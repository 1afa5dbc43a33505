"""DRAY_TOPOLOGY: label keys, from the widest level to the narrowest."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config.settings import read_settings
from service.config.start_refusals import StartRefused


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no .env


def test_levels_are_keys_of_labels_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings().topology == ()
    monkeypatch.setenv("DRAY_TOPOLOGY", "topology.kubernetes.io/zone, rack,nvlink")
    assert read_settings().topology == ("topology.kubernetes.io/zone", "rack", "nvlink")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("rack,rack", "names a level twice"),
        ("rack,node", "contains 'node', which is always added as the last level: remove it"),
        ("rack,", "String should have at least 1 character"),
        ("rack=1", "String should match pattern"),
    ],
)
def test_levels_that_can_not_be_are_refused(
    said: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_TOPOLOGY", said)
    with pytest.raises(StartRefused, match="DRAY_TOPOLOGY") as refused:
        read_settings()
    assert told in str(refused.value)
