"""All uses of Ray's private API in dray. Each part of that API is wrapped in a separate function.

Each function's docstring explains why the public API does not suffice. All functions work with Ray
2.54 to 2.60; if Ray changes the API, tests/unit/workers/node/test_compat_ray.py fails and names the
function. Functions import Ray when called, so that this module can be imported without Ray.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import pickle
from collections.abc import Iterable, Sequence
from typing import Any

PRESTARTED_LANGUAGE = 0
"""Ray's number for the language Python (common.proto)."""
RAYLET_PID = "RAY_RAYLET_PID"
"""Environment variable of workers that contains their raylet's pid."""


def actor_id_of(actor: Any) -> str:
    """Return the id of an actor in hexadecimal. The handle has no public id, and the actor's own
    runtime context is only available in its process."""
    text: str = actor._actor_id.hex()
    return text


def process_of(actor: Any) -> tuple[int, str] | None:
    """Return (pid, node id) of the process that runs an actor; None if there is none. The state API
    returns the same information over HTTP, but requires the dashboard, which might not be
    running."""
    from ray._private.state import actors

    entry = actors(actor_id_of(actor))
    pid, node_id = entry.get("Pid"), entry.get("Address", {}).get("NodeID")
    return (pid, node_id) if pid and node_id else None


def available_by_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each node. `ray.available_resources` only returns the sum over
    all nodes."""
    from ray._private.state import available_resources_per_node

    found: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return found


def drained_nodes() -> dict[str, float]:
    """Return the nodes that are being drained, each with the Unix time of its deadline (inf if it
    has none). `ray drain-node` is public, but no public function lists drained nodes."""
    from ray._private.state import state

    found: dict[str, int] = state.get_draining_nodes()
    return {node: at_ms / 1000 if at_ms else math.inf for node, at_ms in found.items()}


def put_once(key: str, value: str, namespace: str) -> bool:
    """Write a value to the cluster's key-value store unless the key already has a value. Return
    whether the key already had a value. Ray has no public write-once store."""
    from ray.experimental.internal_kv import _internal_kv_put

    existed: bool = _internal_kv_put(key, value, False, namespace=namespace)
    return existed


def get_once(key: str, namespace: str) -> str | None:
    """Return the value that `put_once` has written; None if there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(key, namespace=namespace)
    return None if value is None else value.decode()


def export_class(actor_class: Any) -> bytes:
    """Write the code of an actor class to the cluster's function table, unless this process has
    already done so. Return the code's key in the table, for `use_exported_class`."""
    from ray._private.worker import global_worker as worker

    meta = actor_class.__ray_metadata__
    if meta.last_export_cluster_and_job != worker.current_cluster_and_job:
        worker.function_actor_manager.export_actor_class(  # type: ignore[no-untyped-call]
            meta.modified_class,
            meta.actor_creation_function_descriptor,
            meta.method_meta.methods.keys(),
        )
        meta.last_export_cluster_and_job = worker.current_cluster_and_job
    return pickle.dumps(meta.actor_creation_function_descriptor)


def use_exported_class(actor_class: Any, descriptor: bytes) -> None:
    """Create actors of the class from the code that another process of the same Ray job exported.
    With the public API, Ray exports a class once per process that creates an actor, each time under
    a different key, and keeps the code until the job ends."""
    from ray._private.worker import global_worker as worker

    meta = actor_class.__ray_metadata__
    meta.actor_creation_function_descriptor = pickle.loads(descriptor)
    meta.last_export_cluster_and_job = worker.current_cluster_and_job


def prestart_workers(
    address: str,
    count: int,
    keep_alive_s: int,
    metadata: Sequence[tuple[str, str]],
    limit_s: float,
) -> None:
    """Make a raylet start idle worker processes. Ray itself calls this RPC at startup, but no
    public function does. Raises ImportError or AttributeError if this version of Ray does not have
    the RPC."""
    grpc: Any = importlib.import_module("grpc")
    messages: Any = importlib.import_module("ray.core.generated.node_manager_pb2")
    stubs: Any = importlib.import_module("ray.core.generated.node_manager_pb2_grpc")
    request = messages.PrestartWorkersRequest(
        language=PRESTARTED_LANGUAGE,
        num_workers=count,
        keep_alive_duration_secs=keep_alive_s,
    )
    with grpc.insecure_channel(address) as channel:
        stub = stubs.NodeManagerServiceStub(channel)
        stub.PrestartWorkers(request, metadata=list(metadata), timeout=limit_s)


def start_workers_by(script: str) -> str | None:
    """Make `ray start`, when it runs in this process, start Ray's workers with another script, in a
    Python interpreter that has only the standard library; `ray start` has no option for this.
    Return the path of Ray's own script. If this version of Ray does not allow the script to be
    replaced, return None and change nothing."""
    from ray._private import services
    from ray._private.parameter import RayParams
    from ray._private.workers import default_worker

    if "worker_path" not in inspect.signature(RayParams).parameters:
        return None
    services._site_flags = lambda: ["-I", "-S"]  # used only in the command that starts workers
    changed = functools.partialmethod(RayParams.__init__, worker_path=script)
    RayParams.__init__ = changed  # type: ignore[method-assign,assignment]
    return default_worker.__file__


def import_for_forks(modules: Iterable[str]) -> None:
    """Import these modules, and the modules that Ray's own worker script imports.

    Ray draws a random id for each actor class from a generator. Forked processes would have copies
    of the generator's state and draw the same ids, so these ids are drawn from the operating system
    instead.
    """
    import ray.actor
    from ray import ActorClassID

    class FromSystem:
        @staticmethod
        def from_random() -> ActorClassID:
            return ActorClassID(os.urandom(ActorClassID.size()))

    importlib.import_module("ray._private.workers.default_worker")
    actor: Any = ray.actor
    actor.ActorClassID = FromSystem
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        actor.ActorClassID = ActorClassID


def random_id() -> bytes:
    """Return a random id that is drawn in the same way as Ray's ids."""
    from ray import ActorClassID

    drawn: bytes = ActorClassID.from_random().binary()
    return drawn


def raylet_pid() -> int:
    """Return the pid of this Ray worker's raylet, which is not the parent of a forked worker. Ray
    passes the pid to workers so that they end with the raylet, but has no public function for
    it."""
    return int(os.environ.get(RAYLET_PID) or os.getppid())


def nvml() -> Any:
    """Return Ray's copy of NVIDIA's bindings, for a node without `pynvml`. Raises ImportError if
    Ray does not include these bindings."""
    return importlib.import_module("ray._private.thirdparty.pynvml")
