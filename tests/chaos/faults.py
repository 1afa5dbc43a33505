"""How each fault is injected, by its name in the plan."""

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
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.checkpoint.direct_io import folders
from tests.chaos import crowding, memory
from tests.chaos.ground import PASSING, patiently
from tests.chaos.kinds import OUTSIDE_DEADLINE_S
from tests.chaos.scene import STORE, Missed, Scene, pid_of
from tests.chaos.stopping import STOPPABLE, stop, stop_briefly
from tests.integration.harness import eventually, training_pids

FULL_AT_BYTES = 96 << 10
"""What a file of a rank may grow to on a full disk: less than a checkpoint of the digits, more
than what its metrics need."""
REPLACED_WITHIN_S = 40.0
"""A rank that was stopped is killed first, by the watchdog."""
CLIENT_STOPPED_S = 1.5 * OUTSIDE_DEADLINE_S
BUSY_PER_CPU, OVERLOADED_S = 30, 40.0
"""Processes that want to run all the time, and for how long a machine has them."""
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


def send(scene: Scene, seat: int, number: int) -> None:
    os.kill(pid_of(scene, seat), number)


def out_of_memory(scene: Scene) -> None:
    try:
        memory.exhaust(pid_of(scene, scene.any()))
    except OSError as error:
        raise Missed(f"this machine lets us make no memory cgroup: {error}") from None
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
    """Of whoever is replaced now, once it runs."""
    seat, dead = killed(scene)
    replacement = await_replacement(scene, seat, dead)
    os.kill(replacement, signal.SIGKILL)


def kill_survivor(scene: Scene) -> None:
    """Another rank than the one that is replaced now, once the replacement runs."""
    seat, dead = killed(scene)
    await_replacement(scene, seat, dead)
    survivors = [one for one in scene.seats() if one != seat]
    send(scene, scene.rng.choice(survivors), signal.SIGKILL)


def killed(scene: Scene) -> tuple[int, int]:
    """Kill a rank; which, and its pid."""
    seat = scene.other()
    pid = pid_of(scene, seat)
    os.kill(pid, signal.SIGKILL)
    return seat, pid


def await_replacement(scene: Scene, seat: int, dead: int) -> int:
    found: list[int] = []

    def replaced() -> bool:
        pid = training_pids(scene.job_id).get(seat, dead)
        found.append(pid)
        return pid != dead

    try:
        eventually(replaced, within_s=REPLACED_WITHIN_S)
    except AssertionError:
        raise Missed(f"seat {seat} was never replaced") from None
    return found[-1]


def kill_client(scene: Scene) -> None:
    """Of those outside of the cluster; it is started again."""
    clients, number = scene.client_outside()
    clients.replace(number)


def stop_client(scene: Scene) -> None:
    """For longer than a round has, which then waits for it."""
    clients, number = scene.client_outside()
    with clients.stopped(number):
        time.sleep(CLIENT_STOPPED_S)


def overload(scene: Scene) -> None:
    """Far more wants to run than there are CPUs, for a while that goes on beside what comes next.

    A session each: Linux gives each of them as much of a CPU as all of Ray (sched_autogroup).
    """
    num = BUSY_PER_CPU * (os.cpu_count() or 1)
    subprocess.run([sys.executable, "-c", BUSY, str(num), str(OVERLOADED_S)], check=True)


def damage_newest_and_kill_supervisor(scene: Scene) -> None:
    """Flip a bit of the newest committed checkpoint, told or not, once nobody writes any more."""
    listed = patiently(lambda: scene.client.checkpoints(scene.job_id))
    if len(listed) < 2:
        raise Missed("there are no two checkpoints, one of which could be passed over")
    bases = {each.url.rpartition("/")[0] for each in listed}
    kill_actor(scene, "supervisor")
    with contextlib.suppress(AssertionError):
        eventually(lambda: not training_pids(scene.job_id), within_s=5)
    newest = max((url for base in bases for url in folders(base) if _is_committed(url)), key=_step)
    flip_bit(Path(newest.removeprefix("file://"), checkpoint_files.TENSORS), scene.rng)
    scene.damaged_step = _step(newest)


def _is_committed(url: str) -> bool:
    return Path(url.removeprefix("file://"), checkpoint_files.MANIFEST).exists()


def _step(url: str) -> int:
    return int(url.rpartition("-")[2])


def flip_bit(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(rng.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def fill_disk(scene: Scene) -> None:
    """The rank that saves finds no room for a checkpoint, until it has said so."""
    pid = pid_of(scene, scene.first())
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_AT_BYTES, most))
    try:
        eventually(lambda: _said_no_room(scene), within_s=30, why="no save met the full disk")
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
        raise Missed(str(error)) from None  # a group that has shrunk may lack the rank


def cancel(scene: Scene) -> None:
    try:
        scene.client.cancel(scene.job_id)
    except errors.JobFinished as error:
        raise Missed(str(error)) from None


def preempt(scene: Scene) -> None:
    """As somebody does who needs the slots."""
    try:
        scene.client.preempt(scene.job_id)
    except (errors.JobNotRunning, *PASSING) as error:
        raise Missed(str(error)) from None


def stop_service(scene: Scene) -> None:
    """SIGTERM, and start it again. It takes its embedded Ray along; another one trains on."""
    scene.ground.service.stop()
    scene.ground.service.start()


def kill_cluster(scene: Scene) -> None:
    os.kill(scene.ground.service.gcs_pid(), signal.SIGKILL)


def kill_node(scene: Scene) -> None:
    """One that trains; another joins in its place."""
    assert scene.ground.raylets is not None
    scene.ground.raylets.kill_node(scene.job_id)
    scene.ground.raylets.add_node()


def drain_node(scene: Scene) -> None:
    """As a spot notice does, of one that trains; another joins in its place."""
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
"""They strike the rank themselves whose loss they come after, so that they know which."""
CROWDED = frozenset({"outranked", "quota claimed", "slots recalled"})
"""Others come and take the slots."""
HARMLESS = frozenset(f"{kind} stopped briefly" for kind in STOPPABLE)
"""Nothing may come of them."""
UNDISTURBED = frozenset(
    {
        *("gateway killed", "service killed", "service restarted", "database restarted"),
        *("disk full", "loader killed", "client killed", "client stopped"),
        *("gateway stopped", "service stopped", "rank's init stopped", "worker parent stopped"),
        *HARMLESS,
    }
)
"""Training goes on meanwhile."""


def strike(scene: Scene, blow: tuple[str, ...]) -> tuple[float, tuple[str, ...]]:
    """Inject these faults one right after the other; Unix seconds of the first, and which of them
    found something to strike.

    Missed if the first found nothing.
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
