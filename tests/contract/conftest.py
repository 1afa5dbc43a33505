"""One cluster of each kind for the whole module; every test leaves it empty."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from service.cluster.port import ClusterUnavailable
from service.cluster.ray.embedded import EmbeddedRay
from service.cluster.ray.gateway import GatewayCluster, RayTarget
from tests.contract.grounds import (
    NOT_SIMULATED,
    SILENCE_LIMIT_S,
    SLOTS,
    FakeGround,
    Ground,
    SimGround,
    eventually,
)

SIMULATED = "simulated"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not _is_left_out(item)]


def _is_left_out(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    is_simulated = callspec is not None and callspec.params.get("_cluster") == SIMULATED
    return is_simulated and item.name.partition("[")[0] in NOT_SIMULATED


def _real_ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    """The gateway over its own embedded Ray."""
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
        log_format="text",
    )
    return Ground(GatewayCluster(target), deployment_id, home)


@pytest.fixture(
    scope="module", params=["fake", SIMULATED, pytest.param("ray", marks=pytest.mark.ray)]
)
async def _cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Ground]:
    ground: Ground
    if request.param == "fake":
        ground = FakeGround(tmp_path_factory.mktemp("fake"))
    elif request.param == SIMULATED:
        ground = SimGround(tmp_path_factory.mktemp("simulated"))
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
        await ground.stop()


@pytest.fixture
async def ground(_cluster: Ground) -> AsyncIterator[Ground]:
    yield _cluster
    await _cluster.clear()
    await eventually(_cluster.all_free, "slots are still held")
