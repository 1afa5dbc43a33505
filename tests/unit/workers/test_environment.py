"""What of a node's environment comes to a rank, and how a script reaches storage without it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
import pytest

from dray.train.checkpoints import CheckpointRef
from ray_workers.node import rank_environment
from ray_workers.node.forked_child import Given
from ray_workers.node.forkserver_client import ForkedProcess
from ray_workers.node.storage_access import StorageAccess, answer_to, needs_access
from ray_workers.shared.paths import machine_root
from service.cluster.ray.embedded import MEMORY_LIMITS, EmbeddedRay
from tests.unit.workers.forked import PATIENCE_S, Forked, Server, fork, light, server
from tests.unit.workers.test_keeper import kept
from tests.wire import rank_task

__all__ = ["light", "server"]

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "canary-aws",
    "DRAY_DATABASE_URL": "postgresql://canary-database",
    "HF_TOKEN": "canary-token",
    "NVIDIA_API_KEY": "canary-of-a-prefix",
    "PYTHON_KEYRING_PASSWORD": "canary-of-a-prefix",
    "MY_SETTING": "canary-setting",
}
PASSED = {
    "https_proxy": "http://proxy:1",
    "CUDA_HOME": "/cuda",
    "NCCL_DEBUG": "INFO",
    "LD_LIBRARY_PATH": "/lib",
    "HF_HUB_CACHE": "/cache",
}


def test_an_allow_list_decides_and_the_operator_adds_to_it() -> None:
    node = {**SECRETS, **PASSED, "DRAY_RANK_ENV": "WANDB_MODE, MY_SETTING", "WANDB_MODE": "offline"}
    assert rank_environment.of_ranks({**SECRETS, **PASSED}) == PASSED
    assert rank_environment.of_ranks(node) == {
        **PASSED,
        "WANDB_MODE": "offline",
        "MY_SETTING": "canary-setting",
    }


def test_an_embedded_ray_gets_what_its_node_needs_and_no_more_of_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**SECRETS, **PASSED, "WANDB_MODE": "offline", "RAY_x": "1"}.items():
        monkeypatch.setenv(name, value)
    ray = EmbeddedRay(tmp_path, 1, "d", ["WANDB_MODE"])
    monkeypatch.setenv("RAY_maximum_gcs_dead_node_cached_count", "7")
    found = ray._daemon_environment("instance")
    limits = {**MEMORY_LIMITS, "RAY_maximum_gcs_dead_node_cached_count": "7"}
    assert limits.items() <= found.items(), "unless the operator says otherwise"
    assert found["TMPDIR"].endswith("/ray-instance")
    assert found["DRAY_TMPDIR"] == tempfile.gettempdir()
    assert "canary" not in json.dumps({k: v for k, v in found.items() if not k.startswith("AWS_")})
    assert PASSED.items() <= found.items()
    assert found["AWS_SECRET_ACCESS_KEY"] == "canary-aws"
    assert found["RAY_x"] == "1"
    assert rank_environment.of_ranks(found)["WANDB_MODE"] == "offline"


@pytest.mark.parametrize(("told", "niceness"), [(None, "15"), ("3", "3")])
def test_what_trains_stands_back_and_what_looks_after_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str | None, niceness: str
) -> None:
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    if told is not None:
        monkeypatch.setenv("RAY_worker_niceness", told)
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
    said = subprocess.run([sys.executable, "-c", code], env=found, capture_output=True, check=True)
    assert said.stdout.split() == [b"1", b"1"]


LOOK = """
import os, pathlib
print(sorted(os.environ.items()))
for pid in (os.getpid(), os.getppid()):
    print(pathlib.Path(f"/proc/{pid}/environ").read_bytes())
"""


@pytest.mark.anyio
async def test_no_secret_of_the_node_is_in_a_rank_or_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**SECRETS, **PASSED}.items():
        monkeypatch.setenv(name, value)
    async with kept("tests.unit.workers.light_forkserver") as (keeper, path, _):
        assert await asyncio.wait_for(keeper.problem(), PATIENCE_S) is None
        code, text = await (await fork(path, LOOK)).end()
    assert code == 0
    assert "canary" not in text
    assert all(value in text for value in PASSED.values())


@pytest.mark.anyio
@pytest.mark.parametrize("chosen", [None, "/of/the/operator"])
async def test_compiled_code_lies_where_no_other_user_can_put_any(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if chosen is not None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
    async with kept("tests.unit.workers.light_forkserver") as (keeper, path, _):
        assert await asyncio.wait_for(keeper.problem(), PATIENCE_S) is None
        look = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
        _, text = await (await fork(path, look)).end()
    assert Path(text.strip()) == (Path(chosen) if chosen else machine_root() / "compiled")


@pytest.mark.anyio
async def test_credentials_come_to_the_one_process_that_they_are_for(server: Server) -> None:
    request = {"op": "rank", "task": json.loads(rank_task(spec={"code": LOOK}).to_json())}
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
    assert "canary-aws" not in (await (await server.fork(LOOK)).end())[1]


SCRIPT = """
import os, pathlib
from dray import train
from dray.train import files
os.environ["DRAY_CHECKPOINT_URL"] = "memory://s/jobs/j/attempts/2/checkpoints"
os.environ["DRAY_ARTIFACT_URL"] = "memory://s/jobs/j/attempts/2/artifacts"
folder = pathlib.Path(os.environ["TMPDIR"], "state")
folder.mkdir()
(folder / "weights").write_text("second")
print((train.load_checkpoint().path / "weights").read_text())
print(train.save_checkpoint(folder, 7, keep=1).size_bytes > 0)
print(train.save_artifact(folder / "weights", "weights").size_bytes)
for url in ("memory://s/jobs/other/secret", "memory://s/jobs/j/attempts/2/checkpoints/../../x"):
    try:
        files.read(url)
    except OSError as error:
        print(error)
if not os.fork():
    try:
        files.read("memory://s/jobs/j/attempts/2/artifacts/weights")
    except OSError as error:
        print("training process alone" in str(error), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.anyio
async def test_a_script_keeps_files_in_storage_that_only_its_actor_can_reach(
    server: Server, tmp_path: Path
) -> None:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pipe("/s/jobs/other/secret", b"canary")
    earlier = "memory://s/jobs/j/attempts/1/checkpoints"
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "weights").write_text("first")
    from dray.train import checkpoints

    ref, _ = checkpoints.commit(tmp_path / "before", earlier, 3, {})
    described = rank_task(
        spec={"script": {"entrypoint": "x.py"}},
        checkpoint_url="memory://s/jobs/j/attempts/2/checkpoints",
        artifact_url="memory://s/jobs/j/attempts/2/artifacts",
        resume_from=(CheckpointRef(ref.url, ref.step, ref.manifest_sha256),),
    )
    assert needs_access(described)
    access = StorageAccess(described)
    code = f"import os\nos.environ['TMPDIR'] = {str(tmp_path)!r}\n" + (
        f"os.environ['DRAY_RESUME_FROM'] = {json.dumps([vars(ref)])!r}\n"
        "os.environ['DRAY_SPOOL_PID'] = str(os.getpid())\n" + SCRIPT
    )
    request = {"op": "rank", "task": json.loads(rank_task(spec={"code": code}).to_json())}
    with access.theirs as theirs:
        given = {**request, "given": Given.STORAGE}
        forked = Forked(await ForkedProcess.start(server.path, given, theirs.fileno()))
    said = (await forked.end())[1].splitlines()
    assert said[:3] == ["first", "True", "6"], said
    assert all("is not this job's own" in line for line in said[3:5])
    assert said[5:] == ["True"]
    found = set(memory.find("/s/jobs/j/attempts/2"))
    assert "/s/jobs/j/attempts/2/artifacts/weights" in found
    assert "/s/jobs/j/attempts/2/checkpoints/step-000000000007/manifest.json" in found


def test_what_is_no_request_is_refused_and_a_missing_file_is_told_as_that() -> None:
    assert "error" in answer_to(b"{}", ["memory://a"])
    assert "error" in answer_to(b'{"op": "run", "url": "memory://a/b"}', ["memory://a"])
    request = {"op": "fetch", "url": "memory://a/none", "path": "/dev/null"}
    assert "missing" in answer_to(json.dumps(request).encode(), ["memory://a"])
