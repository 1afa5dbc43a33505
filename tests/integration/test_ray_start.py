"""The embedded Ray starts wherever its temporary folder is, or reports why it does not."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import psutil
import pytest

from dray import Client
from service.cluster.ray import embedded as rays
from service.cluster.ray.embedded import EmbeddedRay, EmbeddedRayError
from tests.integration.harness import (
    Service,
    assert_nothing_left,
    digits,
    eventually,
    script,
    wait_for_step,
)
from tests.marks import SOAK

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

LEAVES_FILES = """
import multiprocessing, os, tempfile

if __name__ == "__main__":
    with multiprocessing.Manager() as manager:  # listens on a socket in the temporary folder
        manager.dict()["key"] = 1
    print("in", tempfile.mkdtemp(prefix="left-"), flush=True)
    os._exit(1)  # cleans up nothing
"""


@SOAK
def test_with_long_paths_a_job_runs_and_its_temporary_files_go_with_it(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * (120 - len(os.fsencode(tmp_path))))
    folder.mkdir()
    (tmp_path / "job.py").write_text(LEAVES_FILES)
    home = tmp_path / ("h" * 100)
    service = Service(home, {"DRAY_LOCAL_SLOTS": "1", "TMPDIR": str(folder)})
    try:
        service.start()
        with service.client as client:
            job = client.submit(script(tmp_path / "job.py"))
            assert client.wait(job.id, timeout_s=90).attempt == 1
            assert_nothing_left(service, job.id)
            (line,) = [line.text for line in client.logs(job.id) if line.text.startswith("in ")]
        left = Path(line.removeprefix("in "))
        eventually(lambda: not left.parent.exists(), why=f"{left} is left")
    finally:
        assert service.stop() == 0
    (root,) = folder.iterdir()
    # What stays, by docs/guides/storage.md; not the Ray's folder, nor any process's own.
    assert {path.name.split("-")[0] for path in root.iterdir()} <= {"compiled", "work"}
    assert b"\x1b" not in (home / "ray" / "daemon.log").read_bytes()


def test_the_reason_is_rays_own_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_ports = rays._free_ports
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def ports(count: int) -> list[int]:
            found = free_ports(count)
            found[1] = port  # its dashboard's
            return found

        monkeypatch.setattr(rays, "_free_ports", ports)
        ray = EmbeddedRay(tmp_path / "home", 1, f"{time.time_ns() % 10**12:012d}")
        said = f"ray start: ValueError: Failed to bind to 127.0.0.1:{port} .*daemon.log"
        with pytest.raises(EmbeddedRayError, match=said):
            ray.ensure()
    assert not (tmp_path / "home" / "ray" / "daemon.json").exists()


def test_no_process_of_the_embedded_ray_listens_to_other_machines(
    embedded: Service, client: Client
) -> None:
    job = client.submit(digits(train={"epochs": 100_000}, resources={"num_workers": 2}))
    wait_for_step(client, job.id, 1)
    daemon = json.loads((embedded.home / "ray" / "daemon.json").read_text())
    pids = set(rays._marked(daemon["instance"]))
    listeners = [
        (one.laddr, one.pid)
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.pid in pids
    ]
    assert len(listeners) > 10
    others = [
        (address.ip, address.port, pid)
        for address, pid in listeners
        if address.ip.removeprefix("::ffff:") != "127.0.0.1"
    ]
    assert others == []
    client.cancel(job.id)
