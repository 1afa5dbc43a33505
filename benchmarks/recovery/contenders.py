"""The contenders, which lose a rank. A turn starts the job, kills rank 1 when it has committed step
50, and waits for the recovery.

A turn raises BenchmarkError if the job does not continue training.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.first_step import plain
from benchmarks.machine import BenchmarkError, clean_environment
from benchmarks.pages import JobPages, SeenCommits, newest
from benchmarks.processes import free_port, running, service, torchrun_command
from benchmarks.ray_train import Driver, driver
from benchmarks.recovery import commits, work
from benchmarks.recovery.commits import Recovery
from dray import Client
from dray.views import DrillState, JobState

TURN_TIMEOUT_S = 180.0
RESTART_TIMEOUT_S = 60.0
"""Timeout for torchrun, which sometimes restarts into a rendezvous that never completes."""
OBSERVE_S = 0.005
"""Pause between two observations of the ranks' progress, for dray and the peers."""
READY_LOOK_S = 0.2
"""Pause between two requests that check whether spares and copies are ready."""
WORKED_ON_S = 0.3
"""Seconds for which torchft's replacement trains before the turn ends."""
T = TypeVar("T")


class Dray:
    """A running service with its embedded Ray, and the ways of killing a rank of its job."""

    def __init__(self, client: Client, code: Path) -> None:
        """code: the folder with the script."""
        self._client = client
        self._code = code
        here = Path(__file__).parent
        for program in (here / work.SCRIPT, Path(plain.__file__)):
            shutil.copy(program, code)

    def killed(self) -> Recovery:
        """Kill a rank externally, by its pid."""
        return self._killed(work.job())

    def killed_of_script(self) -> Recovery:
        """Kill a rank of a user's script that has called `train.prepare`."""
        return self._killed(work.script_job(self._client.upload_code(self._code).id))

    def killed_with_spares(
        self, document: dict[str, Any], num_spares: int, *, at_step: int
    ) -> Recovery:
        """Kill a rank externally once this number of spares is ready, and a copy of a divided
        model is in the memory of the peers. The job is cancelled after the recovery."""

        def is_ready(job_id: str) -> bool:
            copied = "in_memory" not in document["checkpoint"] or any(
                series.values
                for series in self._client.metrics(job_id, ["perf/copy_time_s"]).series.values()
            )
            return copied and self._client.get(job_id).spares_ready >= num_spares

        return self._killed(document, at_step=at_step, is_ready=is_ready)

    def _killed(
        self,
        document: dict[str, Any],
        *,
        at_step: int = work.KILL_AT_STEP,
        is_ready: Callable[[str], bool] | None = None,
    ) -> Recovery:
        """is_ready: whether a rank can be killed. Such a job is cancelled after the recovery."""
        job = self._client.submit(document)
        seen, job_pages = SeenCommits(), JobPages(job.id)
        if is_ready is not None:
            _await(
                lambda: is_ready(job.id), "the spares and copies to be ready", pause_s=READY_LOOK_S
            )

        def victim() -> int | None:
            observations = job_pages.observe()
            seen.take(observations, time.time())
            observation = newest(observations, work.KILLED_RANK)
            return (
                observation.status.pid
                if observation and observation.status.step >= at_step
                else None
            )

        pid = _await(victim, "rank 1 to reach the step")
        killed_at = _kill(pid)

        def recovered() -> Recovery | None:
            seen.take(job_pages.observe(), time.time())
            found = commits.recovery(
                seen.commits, killed_at=killed_at, killed_rank=work.KILLED_RANK
            )
            if found is None or found.caught_up_s is None:
                return None
            # The page of a spare that has taken the rank keeps the spare's own index.
            return found if is_ready is not None or found.whole_s is not None else None

        found = _await(recovered, "the job to continue training")
        if is_ready is not None:
            self._client.cancel(job.id)
            self._client.wait(job.id, TURN_TIMEOUT_S)
        else:
            self._end(job.id)
        return found

    def drilled(self) -> Recovery:
        """Kill a rank with a drill, like a user. The figures are reported by dray."""
        job = self._client.submit(work.job())
        stops = [state for state in JobState if state.is_terminal]
        self._client.wait(job.id, TURN_TIMEOUT_S, [JobState.RUNNING, *stops])
        drill = self._client.drill(
            job.id, kind="kill", rank=work.KILLED_RANK, at_step=work.KILL_AT_STEP
        )
        if drill.state is not DrillState.PASSED or drill.recovery_s is None:
            raise BenchmarkError(f"the drill {drill.state}: {drill.message}")
        self._end(job.id)
        return Recovery(drill.recovery_s, drill.steps_lost or 0)

    def _end(self, job_id: str) -> None:
        job = self._client.wait(job_id, TURN_TIMEOUT_S)
        if job.state is not JobState.SUCCEEDED:
            raise BenchmarkError(f"dray's job ended {job.state}: {job.reason.message}")


@contextlib.contextmanager
def dray(home: Path, num_slots: int = work.NUM_RANKS) -> Iterator[Dray]:
    code = home / "code"
    code.mkdir()
    with service(home, num_slots=num_slots) as client:
        yield Dray(client, code)


class RayTrain:
    """`FailureConfig(max_failures=1)`, in a driver on a cluster, both of which are already
    running."""

    def __init__(self, home: Path, started: Driver) -> None:
        self._home = home
        self._driver = started

    def turn(self, mode: str) -> Recovery:
        """mode: a mode of `work`."""
        folder = Path(tempfile.mkdtemp(dir=self._home))
        self._driver.begin(folder, mode)
        killed_at = _kill_logged(folder)
        if mode == work.REPLICA_GROUPS:
            try:
                _until_whole(folder, killed_at)
            finally:
                (folder / work.WHOLE).touch()
        self._driver.answer()
        return _logged(folder, killed_at)


@contextlib.contextmanager
def ray_train(home: Path) -> Iterator[RayTrain]:
    with driver("benchmarks.recovery.ray_train_driver", home) as started:
        yield RayTrain(home, started)


class Torchrun:
    """`torchrun --max-restarts`, which restarts both ranks."""

    def __init__(self, home: Path) -> None:
        self._home = home

    def turn(self) -> Recovery:
        folder = Path(tempfile.mkdtemp(dir=self._home))
        script = ("-m", "benchmarks.recovery.plain", str(folder))
        command = torchrun_command("--max-restarts", "1", *script, num_ranks=work.NUM_RANKS)
        log = self._home / "torchrun.log"
        with running(command, clean_environment(), log) as process:
            killed_at = _kill_logged(folder, process)
            try:
                ended_well = process.wait(RESTART_TIMEOUT_S) == 0
            except subprocess.TimeoutExpired:
                raise BenchmarkError("torchrun's ranks did not meet again") from None
            if not ended_well:
                raise BenchmarkError(f"torchrun failed:\n{log.read_text()[-3000:]}")
        return _logged(folder, killed_at)


class Torchft:
    """A lighthouse and two replicas. A dead replica is restarted immediately."""

    def __init__(self, home: Path, lighthouse: str) -> None:
        self._home = home
        self._lighthouse = lighthouse

    def turn(self) -> Recovery:
        folder = Path(tempfile.mkdtemp(dir=self._home))
        with contextlib.ExitStack() as stack:
            replicas = [
                stack.enter_context(self._replica(folder, rank)) for rank in range(work.NUM_RANKS)
            ]
            killed_at = _kill_logged(folder, *replicas)
            replicas[work.KILLED_RANK].wait(TURN_TIMEOUT_S)
            stack.enter_context(self._replica(folder, work.KILLED_RANK))
            _until_whole(folder, killed_at)
            if replicas[1 - work.KILLED_RANK].poll() is not None:
                raise BenchmarkError("torchft's survivor also exited")
        return _logged(folder, killed_at)

    @contextlib.contextmanager
    def _replica(self, folder: Path, rank: int) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-m", "benchmarks.recovery.torchft_rank", str(folder), str(rank)]
        environment = clean_environment() | {"TORCHFT_LIGHTHOUSE": self._lighthouse}
        with running(command, environment, self._home / f"replica-{rank}.log") as process:
            try:
                yield process
            finally:
                # torchft would run indefinitely, and does not exit on SIGTERM.
                with contextlib.suppress(ProcessLookupError):
                    process.kill()


def has_torchft() -> bool:
    """Return whether torchft is installed. It does not have wheels for every platform."""
    return importlib.util.find_spec("torchft") is not None


@contextlib.contextmanager
def torchft(home: Path) -> Iterator[Torchft]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.recovery.torchft_lighthouse", str(port)]
    with running(command, clean_environment(), home / "lighthouse.log"):
        yield Torchft(home, f"http://127.0.0.1:{port}")


def _kill_logged(folder: Path, *alive: subprocess.Popen[str]) -> float:
    """Kill the rank whose log contains the step, and return the time of the kill.

    alive: processes that must be alive until then. Raises BenchmarkError if one is not.
    """

    def victim() -> str | None:
        for process in alive:
            if process.poll() is not None:
                raise BenchmarkError(f"it exited with code {process.returncode}: {process.args!r}")
        logged = commits.read(folder, work.KILLED_RANK)
        return next((c.process for c in logged if c.step >= work.KILL_AT_STEP), None)

    return _kill(int(_await(victim, f"a rank in {folder} to reach the step")))


def _kill(pid: int) -> float:
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)
    return killed_at


def _logged(folder: Path, killed_at: float) -> Recovery:
    logged = commits.read(folder)
    found = commits.recovery(logged, killed_at=killed_at, killed_rank=work.KILLED_RANK)
    if found is None:
        raise BenchmarkError(f"no rank continued training in {folder}")
    return found


def _until_whole(folder: Path, killed_at: float) -> None:
    """Wait until torchft's replacement has trained for a while."""
    _await(lambda: _whole_since(folder, killed_at, WORKED_ON_S), "torchft to be complete again")


def _whole_since(folder: Path, killed_at: float, for_s: float) -> bool:
    found = commits.recovery(
        commits.read(folder), killed_at=killed_at, killed_rank=work.KILLED_RANK
    )
    whole_s = found.whole_s if found else None
    return whole_s is not None and time.time() - killed_at - whole_s > for_s


def _await(probe: Callable[[], T | None], what: str, pause_s: float = OBSERVE_S) -> T:
    """Wait for a result of `probe` and return it. Raises BenchmarkError after a timeout."""
    deadline = time.monotonic() + TURN_TIMEOUT_S
    while time.monotonic() < deadline:
        found = probe()
        if found:
            return found
        time.sleep(pause_s)
    raise BenchmarkError(f"timed out after {TURN_TIMEOUT_S:g} s, waiting for {what}")
