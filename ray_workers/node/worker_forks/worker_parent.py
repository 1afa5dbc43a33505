"""The process that has imported Ray, and is forked for each worker process of a raylet.

`worker_entry` starts the parent as `python -P -m ...worker_parent SOCKET LOCK MODULES`, with the
socket to listen on, a file that stays locked as long as this process lives, and the modules to
import in addition to Ray. The parent exits when the raylet does. If the parent is killed, the next
worker's entry script starts another one. Workers that are already forked no longer need their
parent.

A fork copies only one thread, so this process must not have other threads. Ray draws ids, for
example for placement groups, from a random number generator. A fork also copies the generator's
state, so two supervisors would give their groups the same id. Therefore, this process must not have
generated any id before the fork. Both conditions are checked before the first fork. If these
conditions are not met with the installed version of Ray, all workers are started in Ray's usual
way, without forks."""

from __future__ import annotations

import gc
import marshal
import os
import select
import signal
import socket
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ray_workers.node import compat_ray
from ray_workers.node.worker_forks.worker_entry import FORKED, RAYS_SCRIPT
from ray_workers.shared.processes import linux

REQUEST_LIMIT_S = 2.0
"""Seconds within which a worker's entry script must send its request, since other entry scripts are
waiting."""
NUM_WAITING = 128


@dataclass(frozen=True)
class WorkerStart:
    """The properties that a worker inherits from the process that the raylet started for it."""

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    oom_score: str


def listen(path: str) -> socket.socket:
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(NUM_WAITING)
    return listener


def refuse(lock: int, path: str, why: str) -> NoReturn:
    """Never fork for this raylet. The reason is written to the lock file."""
    os.write(lock, why.encode())
    Path(path).unlink()
    print(f"Ray's workers are not forked: {why}", file=sys.stderr, flush=True)  # noqa: T201
    os._exit(1)  # an import might have left a running thread


def why_not() -> str | None:
    """Return why this process must not be forked; None if it can be forked."""
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        return f"the imports have started {threads - 1} threads"
    first, second = (_id_of_a_fork() for _ in range(2))
    if first == second:
        return "forked processes would generate the same random ids"
    return None


def _id_of_a_fork() -> bytes:
    """Return an id that was drawn in a forked process."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, compat_ray.random_id())
        os._exit(0)
    os.close(write)
    with open(read, "rb") as answer:
        return answer.read()


def serve(listener: socket.socket, raylet: int, lock: int) -> WorkerStart | None:
    """Fork a process for each request. Return the request in each forked process, and None in this
    process once the raylet has ended.

    `raylet` is a pidfd.
    """
    events = select.poll()
    events.register(raylet, select.POLLIN)
    events.register(listener, select.POLLIN)
    packing, is_packed = linux.pack(), False  # memory is packed while there are no requests
    while raylet not in (ready := dict(events.poll(None if is_packed else 0))):
        if not ready:
            is_packed = next(packing, True)
            continue
        connection, _ = listener.accept()
        with connection:
            try:
                start = _receive(connection)
                is_child = os.fork() == 0
            # The fork can fail, for example if there is not enough memory.
            except (OSError, EOFError, ValueError, TypeError):
                continue  # the entry script notices that the connection is closed
            if is_child:
                listener.close()
                os.close(raylet)
                os.close(lock)
                _become(start, connection)
                return start
    return None


def _receive(connection: socket.socket) -> WorkerStart:
    connection.settimeout(REQUEST_LIMIT_S)
    data = b""
    while more := connection.recv(1 << 16):
        data += more
    return WorkerStart(*marshal.loads(data))


def _become(start: WorkerStart, connection: socket.socket) -> None:
    """Adopt the entry script's properties in the forked process. Exit if the entry script can no
    longer be notified, or if anything fails before the notification; in these cases, the entry
    script becomes the worker."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.environ.clear()
        os.environ.update(start.environment)
        os.chdir(start.directory)
        Path("/proc/self/oom_score_adj").write_text(start.oom_score)
        connection.sendall(FORKED)
    except BrokenPipeError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def run(script: Path, code: types.CodeType, arguments: list[str]) -> None:
    """Run a script's code in this process in the same way as Python would run the script."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def main(path: str, lock: int, modules: str) -> None:
    raylet = os.pidfd_open(int(os.environ["RAY_RAYLET_PID"]))
    script = Path(os.environ[RAYS_SCRIPT])
    os.set_inheritable(lock, False)
    os.setsid()
    listener = listen(path)  # listen before the imports, since entry scripts are waiting
    try:
        compat_ray.import_for_forks(filter(None, modules.split(",")))
        # Dead children must not remain as zombies, which look alive to the raylet.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        why = why_not()
    except Exception as error:
        traceback.print_exc()
        why = f"{type(error).__name__}: {error}"
    if why is not None:
        refuse(lock, path, why)
    code = compile(script.read_bytes(), script, "exec")
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the pages of all these objects
    if (start := serve(listener, raylet, lock)) is not None:
        run(script, code, start.arguments)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
