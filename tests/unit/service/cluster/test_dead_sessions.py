"""The folder of an embedded Ray is deleted only after all of its processes have ended."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from ray_workers.node.rank_environment import RAY_INSTANCE
from ray_workers.shared import paths
from ray_workers.shared.processes.procfs import pid_namespace
from service.cluster.ray import embedded

NO_PROCESS = 2**22 + 1
"""A number above the highest process id of Linux."""


def _await_exec(pid: int) -> None:
    """Wait until a new process has an environment, which is empty until its program is loaded."""
    deadline = time.monotonic() + 60
    while not Path(f"/proc/{pid}/environ").read_bytes():
        assert time.monotonic() < deadline, f"process {pid} never began"
        time.sleep(0.01)


def test_only_what_is_certainly_dead_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "machine_root", lambda: tmp_path)
    said = {
        "dead": pid_namespace(),
        "alive": pid_namespace(),
        "elsewhere": "another host",
        "silent": None,
    }
    for name, text in said.items():
        (tmp_path / f"ray-{name}").mkdir()
        if text is not None:
            (tmp_path / f"ray-{name}" / embedded.PID_NAMESPACE).write_text(text)
    (tmp_path / "deployment").mkdir()
    environment = {**os.environ, RAY_INSTANCE: "alive"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        _await_exec(process.pid)
        embedded.remove_dead_sessions()
        process.kill()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"ray-alive", "ray-elsewhere", "ray-silent", "deployment"}


def test_a_process_that_does_not_end_when_killed_holds_up_neither_a_start_nor_a_stop_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT_S", 0.0)
    monkeypatch.setattr(embedded, "KILL_LIMIT_S", 0.2)
    monkeypatch.setattr(embedded, "_marked", lambda _: iter([NO_PROCESS]))
    ray = embedded.EmbeddedRay(tmp_path, 1, "deployment")
    record = tmp_path / "ray" / "daemon.json"
    record.parent.mkdir()
    known = embedded.Daemon(NO_PROCESS, 0, "instance", "127.0.0.1:1", "")
    record.write_text(json.dumps(asdict(known)))
    with pytest.raises(embedded.EmbeddedRayError, match=f"have not ended: {NO_PROCESS}"):
        ray.ensure()
    ray.stop()
    assert record.exists()  # for the next service
