"""The node agent, without Ray."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.node import agent
from ray_workers.shared.paths import NODE_TMPDIR


def test_files_of_an_agent_and_its_forkserver_are_their_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_forkserver(directory: Path, *_: object) -> None:
        (directory / "forkserver.log").touch()
        (directory / "spool").mkdir()

    context = SimpleNamespace(get_node_id=lambda: "0" * 56)
    monkeypatch.setattr(agent.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(agent, "ForkserverManager", start_forkserver)
    monkeypatch.setenv(NODE_TMPDIR, str(tmp_path))
    actor_class: Any = agent.NodeAgent
    before = os.umask(0o022)
    try:
        actor_class.__ray_actor_class__("deployment", 60.0)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert {"forkserver.log", "spool"} < set(modes)
    assert [name for name, mode in modes.items() if mode & 0o077] == []
