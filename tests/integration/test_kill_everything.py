"""A script kills everything that it can: every job continues, and none is charged for it.

`kill(-1)` reaches all processes of the user, so the service and its Ray run in a PID namespace of
their own here. Its first process, which such a signal spares, is this file run as a program.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.views import JobState
from tests.integration.harness import PATIENCE_S, ROOT, Service, eventually, script, wait_for_step

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
WAYS = (
    (*ALONE, "--user", "--map-root-user"),
    ALONE,  # root's, where users may make no namespaces
)
STEPS = 6

TRAINS = f"""
import os, sys, tempfile, time
from pathlib import Path
from dray import train

signal_number, folder = int(sys.argv[1]), Path(sys.argv[2])
name, attempt = train.context().job_id, train.context().attempt
checkpoint = train.load_checkpoint()
first = checkpoint.step + 1 if checkpoint else 1
for step in range(first, {STEPS} + 1):
    train.report(step, {{"loss": 1.0 / step}})
    with tempfile.TemporaryDirectory() as state:
        Path(state, "state").write_text(str(step))
        train.save_checkpoint(state, step)
    if step == 3 and attempt == 1:
        if signal_number:
            os.kill(-1, signal_number)
        time.sleep(3600)
"""


@pytest.fixture(scope="module")
def namespace() -> tuple[str, ...]:
    """Return the command that runs another command in its own PID namespace."""
    why = ""
    for way in WAYS:
        try:
            tried = subprocess.run([*way, "true"], capture_output=True, text=True, timeout=20)
        except OSError as error:
            why = str(error)
            continue
        if tried.returncode == 0:
            return way
        why = tried.stderr.strip()
    pytest.skip(f"this machine makes no PID namespace, so kill(-1) is not tried: {why}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, because the paths of sockets are inside it."""
    with tempfile.TemporaryDirectory(prefix="kill-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is not here")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_script_that_signals_everything_is_survived_by_all_and_uncharged(
    number: signal.Signals, namespace: tuple[str, ...], folder: Path
) -> None:
    program = (sys.executable, "-m", __name__, str(folder), str(int(number)))
    ended = subprocess.run(
        [*namespace, *program],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "all went on"


def in_namespace(folder: Path, number: int) -> None:
    """Run as the first process of a PID namespace."""
    assert os.getpid() == 1, "the signal would reach this machine's other processes"
    program = folder / "trains.py"
    program.write_text(TRAINS)
    # A fault that is charged would end the jobs.
    service = Service(folder / "home", {"DRAY_LOCAL_SLOTS": "2", "DRAY_INFRA_RETRIES": "0"})
    threading.Thread(target=_bury, args=(service,), daemon=True).start()
    service.start()
    with service.client as client:
        quiet = client.submit(script(program, "0", str(folder))).id
        wait_for_step(client, quiet, 3)
        eventually(lambda: client.checkpoints(quiet), why="the quiet job has saved nothing")
        killer = client.submit(script(program, str(number), str(folder))).id
    assert service.process is not None
    service.process.wait(timeout=PATIENCE_S)
    print(f"the service ended with {service.process.returncode}", flush=True)
    service.start()
    with service.client as client:
        for job_id in (quiet, killer):
            job = client.wait(job_id, timeout_s=PATIENCE_S)
            events = [(event.code, event.message) for event in client.events(job_id)]
            assert job.state is JobState.SUCCEEDED, (job.reason, events)
            assert job.attempt == 2, events
            assert job.progress is not None
            assert job.progress.step == STEPS
            print(job_id, events, flush=True)
    assert service.stop() == 0


def _bury(service: Service) -> None:
    """Take the ends of processes whose parents are gone, as an init does."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            ended = None
        own = service.process.pid if service.process is not None else 0
        if ended is None or ended.si_pid == own:
            time.sleep(0.05)  # its own end is waited for elsewhere
        else:
            os.waitpid(ended.si_pid, 0)


if __name__ == "__main__":
    in_namespace(Path(sys.argv[1]), int(sys.argv[2]))
    print("all went on", flush=True)
