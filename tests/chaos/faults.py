"""The functions that inject each fault of the plan."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dray import errors
from ray_workers.training.checkpoint import checkpoint_files, manifests
from ray_workers.training.checkpoint.direct_io import folders
from tests.chaos import crowding, memory
from tests.chaos.ground import PASSING, patiently
from tests.chaos.kinds import OUTSIDE_DEADLINE_S
from tests.chaos.scene import STORE, Missed, Scene, pid_of
from tests.chaos.stopping import STOPPABLE, stop, stop_briefly
from tests.integration.harness import eventually, training_pids

FULL_AT_BYTES = 96 << 10
"""Maximum size of a rank's files on a full disk: smaller than a checkpoint of the digits, but large
enough for its metrics."""
REPLACED_WITHIN_S = 40.0
"""Includes the time until the watchdog kills a stopped rank."""
CLIENT_STOPPED_S = 1.5 * OUTSIDE_DEADLINE_S
BUSY_PER_CPU, OVERLOADED_S = 30, 40.0
"""Number of busy processes per CPU, and how long they run."""
BUSY = """
import os, sys, time
ends_at = time.monotonic() + float(sys.argv[2])
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < ends_at:
            pass
        os._exit(0)
"""


def send(scene: Scene, worker_index: int, number: int) -> None:
    os.kill(pid_of(scene, worker_index), number)


def out_of_memory(scene: Scene) -> None:
    try:
        memory.exhaust(pid_of(scene, scene.any()))
    except OSError as error:
        raise Missed(f"can't create a memory cgroup on this machine: {error}") from None
    except AssertionError as error:
        raise Missed(str(error)) from None


def kill_actor(scene: Scene, role: str) -> None:
    os.kill(scene.actor(role), signal.SIGKILL)


def kill_worker_parent(scene: Scene) -> None:
    try:
        os.kill(scene.ground.service.worker_parent(), signal.SIGKILL)
    except ValueError:
        raise Missed("there is no worker parent") from None


def kill_replacement(scene: Scene) -> None:
    """Kill a rank, and then its replacement as soon as it runs."""
    worker_index, dead = killed(scene)
    replacement = await_replacement(scene, worker_index, dead)
    os.kill(replacement, signal.SIGKILL)


def kill_survivor(scene: Scene) -> None:
    """Kill a rank, and then a different rank as soon as the first one's replacement runs."""
    worker_index, dead = killed(scene)
    await_replacement(scene, worker_index, dead)
    survivors = [one for one in scene.worker_indices() if one != worker_index]
    send(scene, scene.rng.choice(survivors), signal.SIGKILL)


def killed(scene: Scene) -> tuple[int, int]:
    """Kill a rank. Return its seat and its pid."""
    worker_index = scene.other()
    pid = pid_of(scene, worker_index)
    os.kill(pid, signal.SIGKILL)
    return worker_index, pid


def await_replacement(scene: Scene, worker_index: int, dead: int) -> int:
    found: list[int] = []

    def replaced() -> bool:
        pid = training_pids(scene.job_id).get(worker_index, dead)
        found.append(pid)
        return pid != dead

    try:
        eventually(replaced, within_s=REPLACED_WITHIN_S)
    except AssertionError:
        raise Missed(f"worker {worker_index} was never replaced") from None
    return found[-1]


def kill_client(scene: Scene) -> None:
    """Kill and restart a client outside of the cluster."""
    clients, number = scene.client_outside()
    clients.replace(number)


def stop_client(scene: Scene) -> None:
    """Stop a client for longer than the deadline of a round, which then waits for it."""
    clients, number = scene.client_outside()
    with clients.stopped(number):
        time.sleep(CLIENT_STOPPED_S)


def overload(scene: Scene) -> None:
    """Run far more busy processes than there are CPUs, for a while and in the background.

    Each has its own session, so that Linux gives each as much CPU time as all of Ray
    (sched_autogroup).
    """
    num = BUSY_PER_CPU * (os.cpu_count() or 1)
    subprocess.run([sys.executable, "-c", BUSY, str(num), str(OVERLOADED_S)], check=True)


def damage_newest_and_kill_supervisor(scene: Scene) -> None:
    """Flip a bit in the newest committed checkpoint, reported or not, after all ranks have
    exited."""
    listed = patiently(lambda: scene.client.checkpoints(scene.job_id))
    if len(listed) < 2:
        raise Missed("there are fewer than two checkpoints, so none can be skipped")
    bases = {each.url.rpartition("/")[0] for each in listed}
    kill_actor(scene, "supervisor")
    with contextlib.suppress(AssertionError):
        eventually(lambda: not training_pids(scene.job_id), within_s=5)
    newest = max((url for base in bases for url in folders(base) if _is_committed(url)), key=_step)
    flip_bit(Path(newest.removeprefix("file://"), checkpoint_files.TENSORS), scene.rng)
    scene.damaged_step = _step(newest)


def _is_committed(url: str) -> bool:
    return Path(url.removeprefix("file://"), manifests.MANIFEST).exists()


def _step(url: str) -> int:
    return int(url.rpartition("-")[2])


def flip_bit(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(rng.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def fill_disk(scene: Scene) -> None:
    """Leave no space for checkpoints of the saving rank until it reports a failure."""
    pid = pid_of(scene, scene.first())
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_AT_BYTES, most))
    try:
        eventually(
            lambda: _said_no_room(scene),
            within_s=30,
            why="no checkpoint failed because of the full disk",
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))


def _said_no_room(scene: Scene) -> bool:
    lines = patiently(lambda: list(scene.client.logs(scene.job_id, rank=0)))
    return any("could not be saved" in line.text for line in lines)


def drill(scene: Scene, kind: str, rank: int) -> None:
    try:
        scene.client.drill(scene.job_id, kind=kind, rank=rank, wait=False)
    except (errors.JobNotRunning, errors.DrillImpossible, *PASSING) as error:
        raise Missed(str(error)) from None  # the rank may be missing in a smaller group


def cancel(scene: Scene) -> None:
    try:
        scene.client.cancel(scene.job_id)
    except errors.JobFinished as error:
        raise Missed(str(error)) from None


def preempt(scene: Scene) -> None:
    """Preempt the job like a user who needs the slots."""
    try:
        scene.client.preempt(scene.job_id)
    except (errors.JobNotRunning, *PASSING) as error:
        raise Missed(str(error)) from None


def stop_service(scene: Scene) -> None:
    """Send SIGTERM and restart the service. Its embedded Ray stops with it; a new one continues
    training."""
    scene.ground.service.stop()
    scene.ground.service.start()


def kill_cluster(scene: Scene) -> None:
    os.kill(scene.ground.service.gcs_pid(), signal.SIGKILL)


def kill_node(scene: Scene) -> None:
    """Kill a node that trains, and add another in its place."""
    assert scene.ground.raylets is not None
    scene.ground.raylets.kill_node(scene.job_id)
    scene.ground.raylets.add_node()


def drain_node(scene: Scene) -> None:
    """Drain a node that trains, as after a spot notice, and add another in its place."""
    assert scene.ground.raylets is not None
    scene.ground.raylets.drain_node(scene.job_id)
    scene.ground.raylets.add_node()


FAULTS: Mapping[str, Callable[[Scene], None]] = {
    "rank 0 killed": lambda s: send(s, s.first(), signal.SIGKILL),
    "rank killed": lambda s: send(s, s.other(), signal.SIGKILL),
    "silo killed": lambda s: send(s, s.other(), signal.SIGKILL),
    "aggregator killed": lambda s: send(s, s.first(), signal.SIGKILL),
    "client killed": kill_client,
    "client stopped": stop_client,
    "rank segfaults": lambda s: send(s, s.any(), signal.SIGSEGV),
    "rank out of memory": out_of_memory,
    "loader killed": lambda s: os.kill(s.loader(), signal.SIGKILL),
    "rank actor killed": lambda s: kill_actor(s, f"worker:{s.any()}:"),
    "supervisor killed": lambda s: kill_actor(s, "supervisor"),
    "store killed": lambda s: send(s, STORE, signal.SIGKILL),
    "forkserver killed": lambda s: os.kill(s.ground.forkserver_of(s.job_id), signal.SIGKILL),
    "node agent killed": lambda s: os.kill(s.node_agent(), signal.SIGKILL),
    "worker parent killed": kill_worker_parent,
    "gateway killed": lambda s: os.kill(s.ground.service.gateway_pid(), signal.SIGKILL),
    "service killed": lambda s: s.ground.restart_service(),
    "newest checkpoint damaged, supervisor killed": damage_newest_and_kill_supervisor,
    "disk full": fill_disk,
    "machine overloaded": overload,
    "drill kill": lambda s: drill(s, "kill", s.rng.randrange(s.kind.num_ranks)),
    "drill stall": lambda s: drill(s, "stall", s.rng.randrange(s.kind.num_ranks)),
    "drill corrupt": lambda s: drill(s, "corrupt", s.rng.randrange(s.kind.num_ranks)),
    "drill preempt": lambda s: drill(s, "preempt", 0),
    "preempted": preempt,
    "outranked": crowding.outrank,
    "quota claimed": crowding.claim_quota,
    "slots recalled": crowding.recall,
    "machine shut down": stop_service,
    "service restarted": stop_service,
    "node drained": drain_node,
    "replacement killed": kill_replacement,
    "survivor killed meanwhile": kill_survivor,
    "cancelled meanwhile": cancel,
    "cluster killed": kill_cluster,
    "node killed": kill_node,
    "database restarted": lambda s: s.ground.restart_postgres(),
    **{f"{kind} stopped": partial(stop, kind=kind) for kind in STOPPABLE},
    **{f"{kind} stopped briefly": partial(stop_briefly, kind=kind) for kind in STOPPABLE},
}
ONE_AFTER_THE_OTHER = frozenset({"replacement killed", "survivor killed meanwhile"})
"""Faults that first kill a rank themselves, because they need to know which one."""
CROWDED = frozenset({"outranked", "quota claimed", "slots recalled"})
"""Other jobs arrive and take the slots."""
HARMLESS = frozenset(f"{kind} stopped briefly" for kind in STOPPABLE)
"""Faults that must have no effect."""
UNDISTURBED = frozenset(
    {
        *("gateway killed", "service killed", "service restarted", "database restarted"),
        *("disk full", "loader killed", "client killed", "client stopped"),
        *("gateway stopped", "service stopped", "rank's init stopped", "worker parent stopped"),
        *HARMLESS,
    }
)
"""Faults during which training continues."""


def strike(scene: Scene, blow: tuple[str, ...]) -> tuple[float, tuple[str, ...]]:
    """Inject these faults in quick succession. Return the Unix time of the first and the faults
    that found a target.

    Raises Missed if the first found none.
    """
    last = blow[-1]
    faults = (last,) if last in ONE_AFTER_THE_OTHER else blow
    struck_at = 0.0
    missed = []
    for name in faults:
        at = time.time()
        try:
            FAULTS[name](scene)
        except (Missed, ProcessLookupError, IndexError) as error:
            if not struck_at:
                raise Missed(f"{name}: {error}") from None
            print(f"  missed: {name}: {error}", flush=True)
            missed.append(name)
        struck_at = struck_at or at
    return struck_at, tuple(name for name in blow if name not in missed)
