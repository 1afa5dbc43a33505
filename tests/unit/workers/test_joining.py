"""Which nodes may carry ranks."""

from __future__ import annotations

from dataclasses import replace

import dray
from ray_workers.node_agent import NodeReport
from service.cluster.ray_side import GatewayConfig, refusal

CONFIG = GatewayConfig(
    deployment_id="d",
    address="127.0.0.1:6379",
    dashboard_url=None,
    shared=True,
    storage_url="file:///srv/dray",
    storage_nonce="the-nonce",
)
SOUND = NodeReport(
    node_id="n",
    hostname="worker-1",
    address="127.0.0.1",
    version=dray.__version__,
    python="3.11.7",
    storage_nonce="the-nonce",
    problem=None,
)


def test_a_node_with_the_same_code_and_files_is_accepted() -> None:
    assert refusal(SOUND, CONFIG) is None


def test_a_node_with_another_version_is_refused_with_both_versions() -> None:
    sentence = refusal(replace(SOUND, version="0.0.1"), CONFIG)
    assert sentence is not None
    assert "0.0.1" in sentence
    assert dray.__version__ in sentence


def test_a_node_that_sees_other_files_is_refused_and_told_what_to_do() -> None:
    for nonce in (None, "another"):
        sentence = refusal(replace(SOUND, storage_nonce=nonce), CONFIG)
        assert sentence is not None
        assert "file:///srv/dray" in sentence
        assert "DRAY_STORAGE_URL" in sentence


def test_shared_object_storage_needs_no_nonce() -> None:
    assert refusal(SOUND, replace(CONFIG, storage_url="s3://bucket/dray", storage_nonce="")) is None


def test_a_failed_preload_is_the_nodes_stated_problem() -> None:
    problem = "its forkserver ended with code 1: No module named 'torch'"
    assert refusal(replace(SOUND, problem=problem), CONFIG) == problem
