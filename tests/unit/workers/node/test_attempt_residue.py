"""A slot is free once nothing that ran in it remains: no process, and no memory on its GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_workers.node import attempt_residue, gpu_memory, session_records
from ray_workers.node.attempt_residue import AttemptResidue
from ray_workers.node.gpu_memory import NvmlMemory
from ray_workers.shared.processes.procfs import carry_mark, started_ticks
from ray_workers.shared.quarantine import QuarantineBook, Quarantined
from tests.unit.workers.node.test_orphans import record

NO_PID = (1 << 22) + 1
"""A pid above the largest pid of Linux."""
OF_THE_DEAD = (1 << 22) + 2
"""The pid of a rank that is gone."""


class FakeGpuMemory:
    def __init__(self, held: Mapping[int, int]) -> None:
        self.by_pid = held
        self.asked: list[str] = []

    def held(self, gpus: str) -> dict[int, int]:
        self.asked.append(gpus)
        return dict(self.by_pid)


def left(
    directory: Path, *tasks: dict[str, Any], gpu: FakeGpuMemory | None = None
) -> AttemptResidue:
    return attempt_residue.of_attempt(directory, tasks, "j", 1, gpu or FakeGpuMemory({}))


def task(pid: int, **more: Any) -> dict[str, Any]:
    return {"job_id": "j", "attempt": 1, "rank": 0, "pid": pid, "left": [], **more}


def test_what_the_forkserver_lists_is_left(tmp_path: Path) -> None:
    found = left(
        tmp_path,
        task(NO_PID),
        task(7, left=[NO_PID + 1]),
        task(8, attempt=2),
        task(9, job_id="k"),
    )
    assert found.pids == (NO_PID, NO_PID + 1)
    assert f"pid {NO_PID}" in found.sentence()
    assert not left(tmp_path)


def test_the_remains_of_some_ranks_alone_can_be_found(tmp_path: Path) -> None:
    tasks = [task(NO_PID), task(NO_PID + 1, rank=1)]
    found = attempt_residue.of_attempt(tmp_path, tasks, "j", 1, FakeGpuMemory({}), [1])
    assert found.pids == (NO_PID + 1,)
    session_records.write_session(tmp_path, record(pid=OF_THE_DEAD, gpus="GPU-1"))
    for ranks, num_left in (([0], 1), ([1], 0)):
        gpu = FakeGpuMemory({OF_THE_DEAD: 1})
        assert len(attempt_residue.of_attempt(tmp_path, [], "j", 1, gpu, ranks)) == num_left


def test_a_sentence_names_the_process() -> None:
    sentence = AttemptResidue((os.getpid(),), {}).sentence()
    assert f"pid {os.getpid()} (" in sentence
    assert "state R" in sentence


def test_what_an_ending_forkserver_still_looks_after_is_left(tmp_path: Path) -> None:
    """No agent asks it any more: its node agent was restarted."""
    entry = record(server_started=started_ticks(os.getpid()))
    session_records.write_session(tmp_path, entry)
    code = "import time; time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], preexec_fn=lambda: carry_mark(entry.mark)
    )
    assert left(tmp_path).pids == (process.pid,)
    assert process.poll() is None, "its own forkserver ends it"
    process.kill()
    process.wait()
    assert not left(tmp_path)


@pytest.mark.parametrize("holder", [OF_THE_DEAD, NO_PID])
def test_memory_of_the_dead_keeps_a_gpu_from_being_free(tmp_path: Path, holder: int) -> None:
    session_records.write_session(tmp_path, record(pid=OF_THE_DEAD, gpus="GPU-1"))
    found = left(tmp_path, gpu=FakeGpuMemory({holder: 3 << 20, os.getpid(): 1 << 30}))
    assert (found.pids, found.gpu_bytes, len(found)) == ((), {"GPU-1": 3 << 20}, 1)
    assert found.sentence() == "GPU GPU-1: 3 MiB still allocated to processes that have ended"
    clean = FakeGpuMemory({os.getpid(): 1 << 30})  # other processes may use it
    assert not left(tmp_path, gpu=clean)
    assert clean.asked == ["GPU-1"]
    assert session_records.read_sessions(tmp_path) == [], "it is done with"


def test_memory_of_others_on_a_shared_gpu_keeps_no_slot(tmp_path: Path) -> None:
    """In a container the processes of other jobs on the GPU have no pid that this node knows."""
    shared = record(pid=OF_THE_DEAD, gpus="0", shares_gpus=True)
    session_records.write_session(tmp_path, shared)
    assert left(tmp_path, gpu=FakeGpuMemory({OF_THE_DEAD: 1, NO_PID: 2})).gpu_bytes == {"0": 1}
    assert not left(tmp_path, gpu=FakeGpuMemory({NO_PID: 2}))


def test_of_a_gpu_is_asked_only_when_its_processes_are_gone(tmp_path: Path) -> None:
    session_records.write_session(tmp_path, record(pid=OF_THE_DEAD, gpus="0"))
    session_records.write_session(tmp_path, record(pid=OF_THE_DEAD, gpus="1", attempt=2))
    gpu = FakeGpuMemory({NO_PID: 1})
    assert left(tmp_path, task(OF_THE_DEAD), gpu=gpu).pids == (OF_THE_DEAD,)
    assert gpu.asked == []


class FakeNvml:
    """The part of NVML's bindings that is used: GPU 0 has two processes, GPU-b can't be read."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:  # noqa: N802
        return f"uuid {name}"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        if handle == "uuid GPU-b":
            raise self.NVMLError
        pids = {"index 0": (5, 6), "uuid GPU-a": (6,)}[handle]
        return [SimpleNamespace(pid=pid, usedGpuMemory=pid * 10 or None) for pid in pids]


def test_nvml_is_asked_by_index_and_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "load_nvml", FakeNvml)
    assert NvmlMemory().held("0,GPU-a,GPU-b") == {5: 50, 6: 120}
    assert NvmlMemory().held("") == {}


def test_without_nvml_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_memory, "load_nvml", lambda: None)
    assert NvmlMemory().held("0") == {}


def test_a_quarantine_outlives_who_wrote_it_down(tmp_path: Path) -> None:
    directory = tmp_path / "quarantine"
    entry = Quarantined("j", 2, 1, {"CPU": 1.0}, "pid 7 is alive", 12.5)
    QuarantineBook(directory).put(entry)
    QuarantineBook(directory).put(Quarantined("k", 1, 2, {}, "too", 13.5))
    (directory / "torn.json").write_text("{")
    again = QuarantineBook(directory)
    assert again.get("j", 2) == entry
    assert again.get("j", 1) is None
    again.remove("j", 2)
    again.remove("j", 2)
    assert [each.job_id for each in again.entries()] == ["k"]
    assert QuarantineBook(tmp_path / "none").entries() == []
