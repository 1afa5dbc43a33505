"""TensorFlow's parameter servers, started as by dray, without Ray.

Requires TensorFlow in this interpreter or in the interpreter given by TENSORFLOW_PYTHON.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dray.spec import JobSpec
from ray_workers.shared.peers.peer_ports import ReservedPort
from ray_workers.training.process.rank_main import environment
from tests.marks import SOAK
from tests.wire import rank_task

PYTHON = os.environ.get("TENSORFLOW_PYTHON", sys.executable)
PROGRAM = Path(__file__).parents[4] / "examples/scripts/tensorflow_parameter_servers/train.py"
DOCUMENT: dict[str, Any] = {
    "script": {
        "entrypoint": "train.py",
        "framework": "tensorflow",
        "roles": {"chief": {}, "worker": {"num_workers": 2}, "ps": {"num_workers": 2}},
    }
}
CHIEF, WORKER, OTHER_WORKER, SERVER = range(4)
PATIENCE_S = 300.0


class Cluster:
    """The ranks of the job, with exactly the same environments as in dray."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._spec = JobSpec.model_validate(DOCUMENT)
        self._folder, self._num_steps = folder, num_steps
        self._ports = [ReservedPort("127.0.0.1") for _ in range(self._spec.resources.num_workers)]
        self.processes = [self.start(rank) for rank in range(len(self._ports))]

    def start(self, rank: int, incarnation: int = 0) -> subprocess.Popen[bytes]:
        task = rank_task(
            spec=DOCUMENT,
            rank=rank,
            incarnation=incarnation,
            local_rank=rank,
            world_size=len(self._ports),
            local_world_size=len(self._ports),
            peers=tuple(map(str, self._ports)),
            folders_dir=str(self._folder),
            folder_url=(self._folder / "kept").as_uri(),
        )
        self._ports[rank].unbind()
        variables = {**os.environ, **environment(task, self._spec), "PYTHONPATH": ""}
        with self._output(rank).open("ab") as output:
            return subprocess.Popen(
                [PYTHON, str(PROGRAM), "--steps", str(self._num_steps)],
                env=variables,
                cwd=self._folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _output(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def said(self, rank: int) -> str:
        return self._output(rank).read_text()

    def steps_done(self) -> int:
        return max(int(step) for step in re.findall(r"^step (\d+): ", self.said(CHIEF), re.M))

    def wait_until_said(self, rank: int, words: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while words not in self.said(rank):
            assert self.processes[rank].poll() is None, self.said(rank)
            assert time.monotonic() < deadline, self.said(rank)
            time.sleep(0.05)

    def kill(self, rank: int) -> None:
        os.killpg(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].wait()

    def end(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.poll() is None:
                self.kill(rank)
        for port in self._ports:
            port.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if subprocess.run([PYTHON, "-c", "import tensorflow"], capture_output=True).returncode:
        pytest.skip(f"TensorFlow is not installed in {PYTHON}; TENSORFLOW_PYTHON may name another")
    (tmp_path / "kept").mkdir()
    return tmp_path


@SOAK
def test_the_chief_goes_on_without_a_worker_and_takes_it_back(folder: Path) -> None:
    cluster = Cluster(folder, num_steps=10**6)
    try:
        cluster.wait_until_said(CHIEF, "step 100: ")
        cluster.kill(WORKER)
        cluster.processes[WORKER] = cluster.start(WORKER, incarnation=1)
        cluster.wait_until_said(CHIEF, "Cluster successfully recovered")
        cluster.kill(OTHER_WORKER)  # the restarted worker remains
        done = cluster.steps_done()
        cluster.wait_until_said(CHIEF, f"step {done + 500}: ")
    finally:
        cluster.end()


@SOAK
def test_without_a_server_all_begin_again_from_the_newest_checkpoint(folder: Path) -> None:
    cluster = Cluster(folder, num_steps=10**6)
    try:
        cluster.wait_until_said(CHIEF, "step 100: ")
        cluster.kill(SERVER)
        assert cluster.processes[CHIEF].wait(PATIENCE_S) != 0, "it has lost a part of the variables"
        assert "UnavailableError" in cluster.said(CHIEF)
    finally:
        cluster.end()
    done = cluster.steps_done()
    again = Cluster(folder, num_steps=done + 50)
    try:
        assert again.processes[CHIEF].wait(PATIENCE_S) == 0, again.said(CHIEF)
        (after,) = re.findall(r"goes on after step (\d+)", again.said(CHIEF))
        assert int(after) >= done
        found = re.search(r"chief: weight (\S+), bias (\S+)", again.said(CHIEF))
        assert found, again.said(CHIEF)
        assert tuple(map(float, found.groups())) == pytest.approx((3.0, 0.5), abs=0.02)
        others = again.processes[1:]
        assert all(process.poll() is None for process in others), "they serve until they are ended"
    finally:
        again.end()
