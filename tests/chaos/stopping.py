"""Stopping processes with SIGSTOP: which ones, for how long, and when they are continued."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping

from ray_workers.shared.processes.procfs import started_ticks
from tests.chaos import plan
from tests.chaos.ground import SILENCE_LIMIT_S, parent_of
from tests.chaos.scene import STORE, Missed, Scene, Stopped, pid_of

BRIEFLY_S = SILENCE_LIMIT_S / 8
"""Half of the time after which users are notified."""
LONG_S = 1.25 * SILENCE_LIMIT_S
"""How long the service is stopped, which is not replaced here: longer than the silence limit."""

STOPPABLE: Mapping[str, Callable[[Scene], int]] = {
    "rank": lambda s: pid_of(s, s.any()),
    "silo": lambda s: pid_of(s, s.other()),
    "aggregator": lambda s: pid_of(s, s.first()),
    "rank's init": lambda s: parent_of(pid_of(s, s.any()), "ray_workers.node.forkserver"),
    "loader": lambda s: s.loader(),
    "rank actor": lambda s: s.actor(f"worker:{s.any()}:"),
    "store": lambda s: pid_of(s, STORE),
    "supervisor": lambda s: s.actor("supervisor"),
    "forkserver": lambda s: s.ground.forkserver_of(s.job_id),
    "node agent": lambda s: s.node_agent(),
    "gateway": lambda s: s.ground.service.gateway_pid(),
    "service": lambda s: s.ground.service.pid,
    "worker parent": lambda s: s.ground.service.worker_parent(),
    "raylet": lambda s: s.ground.service.ray_child("raylet/raylet"),
    "GCS": lambda s: s.ground.service.ray_child("gcs_server"),
}
"""Functions that return the pid of each kind of process."""
TOLD_AS: Mapping[str, str] = {
    "supervisor stopped": "supervisor",
    "node agent stopped": "node_agent",
    "forkserver stopped": "forkserver",
    "rank actor stopped": "rank_actor",
    "store stopped": "store",
}
"""`data.process` of the event that notifies users."""
TELLERS = frozenset(
    {
        *("service stopped", "service killed", "gateway stopped", "gateway killed"),
        *("raylet stopped", "GCS stopped"),
    }
)
"""Faults during which other processes are not checked, so these may be replaced without notice."""
TELLER_OF = {"forkserver stopped": frozenset({"node agent killed", "node agent stopped"})}
"""Only the node's agent checks the forkserver, and a new agent immediately starts a new
forkserver."""
NOT_REPLACED = frozenset({"service", "rank's init", "worker parent"})
"""These are not replaced: there is only one service, an init has nothing to do until it exits, and
a worker parent is needed only to start a worker, which may be in a later turn."""
REPLACED_WITHIN_S = {"raylet": 240.0}
"""Limits for processes for which `promises.NOTHING_LEFT_WITHIN_S` is too short: Ray takes a minute
to declare a node dead, and dray waits two more minutes before it starts another Ray
(docs/explanation/faults.md)."""
assert set().union(*plan.STOPPABLE.values()) == set(STOPPABLE)


def stop(scene: Scene, *, kind: str) -> None:
    """Stop a process with SIGSTOP. Only the service is continued after a while."""
    stopped = _stop(scene, kind)
    if kind == "service":
        time.sleep(LONG_S)
        stopped.let_go()
    else:
        scene.stopped.append(stopped)


def stop_briefly(scene: Scene, *, kind: str) -> None:
    stopped = _stop(scene, kind)
    time.sleep(BRIEFLY_S)
    if not stopped.is_still:
        raise Missed(f"{kind} ended while it was stopped")
    stopped.let_go()


def _stop(scene: Scene, kind: str) -> Stopped:
    try:
        pid = STOPPABLE[kind](scene)
    except ValueError:  # none, or one that is exiting while its successor runs
        raise Missed(f"there is no {kind}") from None
    stopped = Stopped(kind, pid, started_ticks(pid))
    os.kill(pid, signal.SIGSTOP)
    return stopped


def let_go(scene: Scene) -> None:
    for stopped in scene.stopped:
        stopped.let_go()
    scene.stopped.clear()
