"""DRAY_AUTOSCALE_NODES: valid values, and error messages for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.config.node_types import NodeType
from service.config.settings import read_settings
from service.config.start_refusals import StartRefused


@pytest.fixture(autouse=True)
def _on_a_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # no .env
    monkeypatch.setenv("DRAY_RAY_ADDRESS", "head:6379")


def test_types_are_numbers_of_nodes_with_their_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "4x CPU=8 memory=32GiB, 2 x CPU=16 GPU=4 accelerator_type:H100=1"
    monkeypatch.setenv("DRAY_AUTOSCALE_NODES", said)
    h100 = {"CPU": 16.0, "GPU": 4.0, "accelerator_type:H100": 1.0}
    assert read_settings().autoscale_nodes == (
        NodeType({"CPU": 8.0, "memory": 32.0 * 2**30}, 4),
        NodeType(h100, 2),
    )


def test_by_default_no_node_may_be_added() -> None:
    assert read_settings().autoscale_nodes == ()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("CPU=8", "'CPU=8' is not a number of nodes followed by resources, as in `4x CPU=8"),
        ("4x", "'4x' is not a number of nodes"),
        ("4x cpus=8", "'cpus=8' is not a resource: write NAME=AMOUNT"),
        ("4x CPU=1.2.3", "'1.2.3' is not a number"),
        ("4x CPU=8 memory=8G", "is ambiguous"),
        ("4x GPU=8", "has no CPU, but every worker needs a CPU"),
        ("600x CPU=8, 600x CPU=4", "lists more than 1000 nodes in total"),
    ],
)
def test_an_entry_that_is_wrong_is_named(
    said: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_AUTOSCALE_NODES", said)
    with pytest.raises(StartRefused) as refused:
        read_settings()
    assert "DRAY_AUTOSCALE_NODES is invalid" in str(refused.value)
    assert told in str(refused.value)


def test_the_embedded_ray_has_no_autoscaler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAY_RAY_ADDRESS")
    monkeypatch.setenv("DRAY_AUTOSCALE_NODES", "4x CPU=8")
    with pytest.raises(StartRefused, match="the embedded Ray has no autoscaler"):
        read_settings()
