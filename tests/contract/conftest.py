"""One fake and one real cluster for the whole module; every test leaves them empty."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from service.cluster.port import ClusterUnavailable
from service.cluster.ray.embedded import EmbeddedRay
from service.cluster.ray.gateway import GatewayCluster, RayTarget
from tests.contract.grounds import SILENCE_LIMIT_S, SLOTS, Ground, eventually, fake_ground
from tests.fakes.cluster import FakeCluster


def _real_ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """The gateway over an embedded Ray of its own."""
    home = tmp_path_factory.mktemp("real")
    storage = home / "storage"
    storage.mkdir()
    (storage / ".dray-nonce").write_text("seen")
    deployment_id = f"contract-{secrets.token_hex(4)}"
    target = RayTarget(
        deployment_id=deployment_id,
        storage_url=storage.as_uri(),
        storage_nonce="seen",
        embedded=EmbeddedRay(home, SLOTS, deployment_id),
        silence_limit_s=SILENCE_LIMIT_S,
    )
    return Ground(GatewayCluster(target), deployment_id, home)


@pytest.fixture(scope="module", params=["fake", pytest.param("ray", marks=pytest.mark.ray)])
async def _cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ground]:
    if request.param == "fake":
        ground = fake_ground(tmp_path_factory.mktemp("fake"))
    else:
        ground = _real_ground(tmp_path_factory)
    await ground.cluster.start()

    async def accepted() -> bool:
        try:
            nodes = (await ground.cluster.snapshot()).nodes
        except ClusterUnavailable:
            return False
        return bool(nodes) and all(node.accepted for node in nodes)

    try:
        await eventually(accepted, "the cluster never had an accepted node")
        yield ground
    finally:
        await ground.cluster.stop()
        if isinstance(ground.cluster, FakeCluster):
            await ground.cluster.shut_down()


@pytest.fixture
async def ground(_cluster: Ground) -> AsyncIterator[Ground]:
    yield _cluster
    await _cluster.clear()
    await eventually(_cluster.all_free, "slots are still held")
