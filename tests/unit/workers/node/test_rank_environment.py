"""The variables of a node's environment that reach its ranks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ray_workers.node import rank_environment
from ray_workers.node.forkserver.client import ForkedProcess
from ray_workers.node.forkserver.forked_child import Given
from ray_workers.shared.paths import machine_root
from service.cluster.ray.embedded import MEMORY_LIMITS, EmbeddedRay
from tests.unit.workers.forked import PATIENCE_S, Forked, Server, fork, light, server
from tests.unit.workers.node.forkserver.test_forkserver_manager import managed
from tests.wire import rank_task

__all__ = ["light", "server"]

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "canary-aws",
    "DRAY_DATABASE_URL": "postgresql://canary-database",
    "HF_TOKEN": "canary-token",
    "NVIDIA_API_KEY": "canary-of-a-prefix",
    "PYTHON_KEYRING_PASSWORD": "canary-of-a-prefix",
    "MY_SETTING": "canary-setting",
    "REDIS_CACHE": "redis://:canary-of-a-cache@host",
    "DATABASE_CACHE": "host:6379,password=canary-of-a-cache",
}
PASSED = {
    "https_proxy": "http://proxy:1",
    "CUDA_HOME": "/cuda",
    "NCCL_DEBUG": "INFO",
    "LD_LIBRARY_PATH": "/lib",
    "HF_HUB_CACHE": "/cache",
    "PYTHONHASHSEED": "0",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "NCCL_IB_PKEY": "0",
}


def test_an_allow_list_decides_and_the_operator_adds_to_it() -> None:
    node = {**SECRETS, **PASSED, "DRAY_RANK_ENV": "WANDB_MODE, MY_SETTING", "WANDB_MODE": "offline"}
    assert rank_environment.of_ranks({**SECRETS, **PASSED}) == PASSED
    assert rank_environment.of_ranks(node) == {
        **PASSED,
        "WANDB_MODE": "offline",
        "MY_SETTING": "canary-setting",
    }


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA_APIKEY", "TORCH_APIKEY", "CUDA_APITOKEN", "NCCL_ACCESSKEY", "UCX_KEY2"),
        *("NVIDIA_PAT", "NVIDIA_PATS", "XDG_PASS", "TORCH_PWD", "PYTORCH_AUTH", "TORCH_KEYS_FILE"),
        *("PYTHON_CREDENTIAL", "PYTHON_SECRETS", "PYTHON_TOKENS", "PYTHON_SETTING", "TOKEN_CACHE"),
    ],
)
def test_no_prefix_lets_a_name_through_that_speaks_of_a_secret(name: str) -> None:
    assert rank_environment.of_ranks({name: "/canary"}) == {}
    assert rank_environment.of_ranks({name: "/canary", "DRAY_RANK_ENV": name}) == {name: "/canary"}


@pytest.mark.parametrize("name", ["NVIDIA_PATH", "TORCH_PATCHES", "XDG_SEAT_PATH", "NCCL_KEYSTONE"])
def test_a_name_that_only_resembles_one_passes(name: str) -> None:
    assert rank_environment.of_ranks({name: "x"}) == {name: "x"}


def test_an_embedded_ray_gets_what_its_node_needs_and_no_more_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SECRETS, **PASSED, "WANDB_MODE": "offline", "RAY_x": "1"}.items():
        monkeypatch.setenv(name, value)
    ray = EmbeddedRay(tmp_path, 1, "d", ["WANDB_MODE"])
    monkeypatch.setenv("RAY_maximum_gcs_dead_node_cached_count", "7")
    found = ray._daemon_environment("instance")
    limits = {**MEMORY_LIMITS, "RAY_maximum_gcs_dead_node_cached_count": "7"}
    assert limits.items() <= found.items(), "unless the operator decides otherwise"
    assert found["TMPDIR"].endswith("/ray-instance")
    assert found["DRAY_TMPDIR"] == tempfile.gettempdir()
    assert "canary" not in json.dumps({k: v for k, v in found.items() if not k.startswith("AWS_")})
    assert PASSED.items() <= found.items()
    assert found["AWS_SECRET_ACCESS_KEY"] == "canary-aws"
    assert found["RAY_x"] == "1"
    assert rank_environment.of_ranks(found)["WANDB_MODE"] == "offline"


@pytest.mark.parametrize(("set_to", "niceness"), [(None, "0"), ("3", "3")])
def test_ranks_have_the_set_niceness_and_the_processes_that_manage_them_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_to: str | None, niceness: str
) -> None:
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    if set_to is not None:
        monkeypatch.setenv("RAY_worker_niceness", set_to)
    found = EmbeddedRay(tmp_path, 1, "d", [])._daemon_environment("instance")
    assert found["RAY_worker_niceness"] == "0"
    assert found["RAY_process_group_cleanup_enabled"] == "false", "or no worker leads a session"
    assert rank_environment.of_ranks(found)["DRAY_RANK_NICENESS"] == niceness


def test_the_dashboard_of_an_embedded_ray_asks_every_second_which_actor_a_process_holds(
    tmp_path: Path,
) -> None:
    code = "from ray.dashboard import consts; from ray.dashboard.modules.node import node_consts; "
    code += "print(consts.RAY_DASHBOARD_STATS_UPDATING_INTERVAL, "
    code += "node_consts.NODE_STATS_UPDATE_INTERVAL_SECONDS)"
    found = EmbeddedRay(tmp_path, 1, "d", [])._daemon_environment("instance")
    ran = subprocess.run([sys.executable, "-c", code], env=found, capture_output=True, check=True)
    assert ran.stdout.split() == [b"1", b"1"]


SHOW = """
import os, pathlib
print(sorted(os.environ.items()))
for pid in (os.getpid(), os.getppid()):
    print(pathlib.Path(f"/proc/{pid}/environ").read_bytes())
"""


async def test_no_secret_of_the_node_is_in_a_rank_or_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**SECRETS, **PASSED}.items():
        monkeypatch.setenv(name, value)
    async with managed("tests.unit.workers.light_forkserver") as (manager, path, _):
        assert await asyncio.wait_for(manager.problem(), PATIENCE_S) is None
        code, text = await (await fork(path, SHOW)).end()
    assert code == 0
    assert "canary" not in text
    assert all(value in text for value in PASSED.values())


@pytest.mark.parametrize("chosen", [None, "/of/the/operator"])
async def test_compiled_code_is_where_no_other_user_can_put_any(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
    async with managed("tests.unit.workers.light_forkserver") as (manager, path, _):
        assert await asyncio.wait_for(manager.problem(), PATIENCE_S) is None
        look = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
        _, text = await (await fork(path, look)).end()
    assert Path(text.strip()) == (Path(chosen) if chosen else machine_root() / "compiled")


async def test_credentials_come_to_the_one_process_that_they_are_for(server: Server) -> None:
    request = {"op": "rank", "task": json.loads(rank_task(spec={"code": SHOW}).to_json())}
    with open(os.memfd_create("given"), "r+b") as file:
        file.write(json.dumps({"AWS_SECRET_ACCESS_KEY": "canary-aws"}).encode())
        file.seek(0)
        given = {**request, "given": Given.CREDENTIALS}
        one = Forked(await ForkedProcess.start(server.path, given, file.fileno()))
    code, text = await one.end()
    variables, *seen_from_outside = text.splitlines()
    assert code == 0
    assert "canary-aws" in variables
    assert "canary-aws" not in "".join(seen_from_outside)
    assert "canary-aws" not in (await (await server.fork(SHOW)).end())[1]
