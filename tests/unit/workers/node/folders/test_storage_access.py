"""A script keeps files in storage for which only its node has credentials."""

from __future__ import annotations

import itertools
import json
import socket
from pathlib import Path

import fsspec
import pytest

from dray.train import files
from dray.train.checkpoints import CheckpointRef
from ray_workers.node.folders.storage_access import StorageAccess, answer_to, needs_access
from ray_workers.node.forkserver.client import ForkedProcess
from ray_workers.node.forkserver.forked_child import Given
from tests.unit.workers.forked import Forked, Server, light, server
from tests.wire import rank_task

__all__ = ["light", "server"]

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
        print("only by the training process" in str(error), flush=True)
    os._exit(0)
os.wait()
"""


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
    lines = (await forked.end())[1].splitlines()
    assert lines[:3] == ["first", "True", "6"], lines
    assert all("does not belong to this job" in line for line in lines[3:5])
    assert lines[5:] == ["True"]
    found = set(memory.find("/s/jobs/j/attempts/2"))
    assert "/s/jobs/j/attempts/2/artifacts/weights" in found
    assert "/s/jobs/j/attempts/2/checkpoints/step-000000000007/manifest.json" in found


def test_invalid_requests_are_refused_and_missing_files_are_reported() -> None:
    assert "error" in answer_to({}, ["memory://a"])
    assert "error" in answer_to({"op": "run", "url": "memory://a/b"}, ["memory://a"])
    request = {"op": "fetch", "url": "memory://a/none", "path": "/dev/null"}
    assert "missing" in answer_to(request, ["memory://a"])


def test_the_answer_to_a_request_that_a_signal_ended_is_not_taken_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        monkeypatch.setenv("DRAY_STORAGE_FD", str(theirs.fileno()))
        monkeypatch.setattr(files, "_answers", None)
        monkeypatch.setattr(files, "_numbers", itertools.count(7))
        ours.sendall(b'[6, {"error": "of the request before"}]\n[7, {"done": null}]\n')
        files.remove_file("memory://a/b")
        assert json.loads(ours.recv(1000))[0] == 7
