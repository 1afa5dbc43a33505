"""Folders of embedded Rays are deleted when nothing of their Ray is left, and not before."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from ray_workers.node.rank_environment import RAY_INSTANCE
from ray_workers.shared import paths
from ray_workers.shared.processes.procfs import place
from service.cluster.ray import embedded


def _await_exec(pid: int) -> None:
    """Return once a new process has its environment; before its program is laid out it has none."""
    deadline = time.monotonic() + 60
    while not Path(f"/proc/{pid}/environ").read_bytes():
        assert time.monotonic() < deadline, f"process {pid} never began"
        time.sleep(0.01)


def test_only_what_is_certainly_dead_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "machine_root", lambda: tmp_path)
    said = {"dead": place(), "alive": place(), "elsewhere": "another host", "silent": None}
    for name, text in said.items():
        (tmp_path / f"ray-{name}").mkdir()
        if text is not None:
            (tmp_path / f"ray-{name}" / embedded.PLACE).write_text(text)
    (tmp_path / "deployment").mkdir()
    environment = {**os.environ, RAY_INSTANCE: "alive"}
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        _await_exec(process.pid)
        embedded.remove_dead_sessions()
        process.kill()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"ray-alive", "ray-elsewhere", "ray-silent", "deployment"}
