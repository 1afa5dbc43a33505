"""A job lacks nodes on a Ray with an autoscaler: nodes are added, it runs, and they are removed.

Ray's own cluster for such tests ends every other Ray of the machine when it starts, so all of this
runs in namespaces of its own: processes, network, shared memory and mounts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dray import Client, views
from dray.views import JobState
from tests.integration.harness import ROOT, Service, eventually

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

ALONE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--ipc", "--mount")
AS_INIT = ("sh", "-c", '"$@"; exit $?', "init")
"""The first process, which reaps orphaned processes."""
STORE = {"object_store_memory": 100_000_000}
NODE = {"CPU": 2}
MOST = 3
HEAD_PORT = 6379
IDLE_MINUTES = 0.1
"""Time after which Ray ends an idle node."""
PROVIDER = {
    "type": "fake_multinode",
    "use_node_id_as_ip": True,  # its nodes share an address
    "disable_node_updaters": True,
    "disable_launch_config_check": True,
    "foreground_node_launch": True,
    "worker_liveness_check": False,
}
EXAMPLE = {
    "cluster_name": "fake_multinode",
    "max_workers": 8,
    "idle_timeout_minutes": IDLE_MINUTES,
    "upscaling_speed": 1.0,
    "provider": PROVIDER,
    "available_node_types": {},
    "head_node_type": "ray.head.default",
    "docker": {},
    "auth": {},
    "file_mounts": {},
    "cluster_synced_files": [],
    "file_mounts_sync_continuously": False,
    "rsync_exclude": [],
    "rsync_filter": [],
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
}
"""The defaults file that Ray's wheel lacks."""
SAID = " s: "
"""A text in each line of this test, to find it among Ray's lines."""
WAITS = """
import sys, time
from pathlib import Path
from dray import train

step = 0
while not Path(sys.argv[1]).exists():
    step += 1
    train.report(step, {"loss": 1.0})
    time.sleep(0.1)
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder with a short name, because the paths of sockets are inside it."""
    with tempfile.TemporaryDirectory(prefix="as-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is not here")
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_nodes_come_for_a_job_and_go_when_it_has_ended(version: str, root: Path) -> None:
    why_not = subprocess.run([*ALONE, "true"], capture_output=True, text=True)
    if why_not.returncode:
        pytest.skip(f"this machine makes no namespaces: {why_not.stderr.strip()}")
    program = (sys.executable, "-m", __name__, str(root), version)
    environment = {**os.environ, "TMPDIR": str(root), "RAY_TMPDIR": str(root)}
    ended = subprocess.run(
        [*ALONE, *AS_INIT, *program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = [line for line in ended.stdout.splitlines() if SAID in line]
    print(*said, sep="\n")
    assert said[-1].endswith("the nodes are gone")


def in_namespaces(root: Path, version: str) -> None:
    """Run as the child of the first process of its namespaces."""
    assert os.getppid() == 1, "Ray's start would end this machine's other Rays"
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    _give_ray_its_defaults(root)
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:6.1f}{SAID}{line}", flush=True)

    cluster = _start_ray(root, version)
    say(f"Ray runs with the autoscaler {version}")
    service = Service(root / "home", _settings(root))
    service.process = service.spawn()
    try:
        with Client(service.url) as client:
            eventually(lambda: _cluster(client).connected, why="the service never met Ray")
            _scale(client, root, say)
    except BaseException as error:
        error.add_note(_state(service))
        error.add_note(_monitor_log(root))
        raise
    finally:
        service.stop()
        cluster.shutdown()


def _give_ray_its_defaults(root: Path) -> None:
    """Mount a copy of the provider's folder, with the file that the wheel lacks, over it."""
    import yaml
    from ray.autoscaler._private import fake_multi_node

    folder, copy = Path(fake_multi_node.__file__).parent, root / "provider"
    shutil.copytree(folder, copy)
    (copy / "example.yaml").write_text(yaml.safe_dump(EXAMPLE))
    subprocess.run(["mount", "--bind", str(copy), str(folder)], check=True)


def _start_ray(root: Path, version: str) -> Any:
    from ray.cluster_utils import AutoscalingCluster

    worker = {"resources": NODE | STORE, "node_config": {}, "min_workers": 0, "max_workers": MOST}
    cluster = AutoscalingCluster(
        {"CPU": 0} | STORE, {"worker": worker}, autoscaler_v2=version == "v2"
    )
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cluster.start(override_env={"PYTHONPATH": str(ROOT), "RAY_TMPDIR": str(root)})
    return cluster


def _settings(root: Path) -> dict[str, str]:
    return {
        "DRAY_RAY_ADDRESS": f"127.0.0.1:{HEAD_PORT}",
        "DRAY_AUTOSCALE_NODES": f"{MOST}x CPU={NODE['CPU']}",
        "DRAY_AUTOSCALE_IDLE_S": "2",
        "PYTHONPATH": str(ROOT),
    }


def _cluster(client: Client) -> views.Cluster:
    try:
        return client.cluster()
    except Exception:  # the server is starting
        return views.Cluster(connected=False, nodes=[])


def _scale(client: Client, root: Path, say: Any) -> None:
    (root / "waits.py").write_text(WAITS)
    over = root / "over"
    job = client.submit(
        {
            "script": {"entrypoint": str(root / "waits.py"), "args": [str(over)]},
            "resources": {"num_workers": 4},
        }
    )
    told = eventually(lambda: _said(client, job.id, "Ray was asked for 2 more nodes"))
    say(f"the job says: {told}")
    eventually(lambda: num_workers(client) == 2, why="the nodes never came")
    say("two nodes have come")
    eventually(lambda: client.get(job.id).state is JobState.RUNNING, why="the job never ran")
    say("the job runs on both")
    eventually(lambda: is_withdrawn(client), why="the demand was never withdrawn")
    say("the demand is withdrawn")
    over.touch()
    eventually(lambda: client.get(job.id).state is JobState.SUCCEEDED, why="it never ended")
    assert client.get(job.id).attempt == 1, "the autoscaler took a node that was in use"
    say("the job has succeeded")
    eventually(lambda: num_workers(client) == 0, why="the nodes never went")
    say("the nodes are gone")


def _said(client: Client, job_id: str, words: str) -> str:
    message = client.explain(job_id).reason.message
    return message if words in message else ""


def num_workers(client: Client) -> int:
    return sum(node.alive and bool(node.resources.get("CPU")) for node in client.cluster().nodes)


def is_withdrawn(client: Client) -> bool:
    state = client.cluster().autoscaling
    return state is not None and state.num_nodes == 0


def _state(service: Service) -> str:
    """Return the nodes, the jobs and their events, and the service's own log without requests."""
    with Client(service.url) as client:
        said = [*client.cluster().nodes]
        events = [event for job in client.jobs() for event in client.events(job.id)]
    log = [line for line in service.log().splitlines() if "api.access" not in line]
    return "\n".join(map(str, [*said, *events, *log[-40:]]))


def _monitor_log(root: Path) -> str:
    logs = sorted(root.glob("ray/session_latest/logs/monitor*"))
    return "\n".join(log.read_text(errors="replace")[-3000:] for log in logs)


if __name__ == "__main__":
    in_namespaces(Path(sys.argv[1]), sys.argv[2])
