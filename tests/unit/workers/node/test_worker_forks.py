"""Workers of Ray that are forked, with a test script instead of Ray's own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from ray_workers.node.worker_forks import worker_entry
from ray_workers.node.worker_forks.worker_entry import (
    JOB_OF_WORKER,
    RAYS_SCRIPT,
    is_forked,
    socket_of,
)
from tests.integration.harness import eventually
from tests.marks import ONE_SET
from tests.unit.workers.forked import is_alive

SCRIPT = """
import os, sys
from pathlib import Path
here = Path(__file__).parent
note = [str(os.getpid()), str(os.getppid()), *sys.argv[1:2], os.environ.get("OF_THE_ENTRY", "")]
if "ray" in sys.modules:
    import ray
    note += [ray.ActorClassID.from_random().hex(), str(os.getsid(0) == os.getpid())]
assert __name__ == "__main__" and sys.path[0] == str(here) and sys.argv[0] == __file__
draft = here / f"{os.getpid()}.draft"
draft.write_text(" ".join(note))
draft.rename(here / f"{sys.argv[1]}.note")
"""
CODE_ROOT = Path(__file__).parents[4]
PRELOADED = "ray_workers.supervision.preload_minimal"


@dataclass
class Node:
    """A raylet, as the starts of its workers see it."""

    folder: Path
    raylet: subprocess.Popen[bytes]

    @property
    def path(self) -> str:
        return f"{self.folder}/raylet-forks"

    def start_worker(
        self, name: str, modules: str = PRELOADED, *more: str, flags: tuple[str, ...] = ("-I", "-S")
    ) -> None:
        """Run the entry like the raylet; returns when it has ended, or become the worker."""
        words = [name, f"--raylet-name={self.folder}/raylet", f"--worker-preload-modules={modules}"]
        environment = {
            **os.environ,
            "RAY_RAYLET_PID": str(self.raylet.pid),
            RAYS_SCRIPT: str(self.folder / "script.py"),
            "OF_THE_ENTRY": name,
            "PYTHONPATH": f"{self.folder}:{CODE_ROOT}",
        }
        command = [sys.executable, *flags, worker_entry.__file__, *words, *more]
        subprocess.run(command, env=environment, check=True, timeout=60, cwd=self.folder)

    def note(self, name: str) -> list[str]:
        """The notes of a worker's script."""
        path = self.folder / f"{name}.note"
        eventually(path.exists)
        return path.read_text().split()

    def parent(self) -> int:
        """The pid of the process that forks this node's workers, once these have ended."""
        eventually(lambda: len(self.parents()) == 1)
        return self.parents()[0]

    def parents(self) -> list[int]:
        """Live processes that fork this node's workers, and forks without another title yet."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if entry.name.isdigit() and self.path.encode() in words:
                    found.append(int(entry.name))
        return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "script.py").write_text(SCRIPT)
    raylet = subprocess.Popen(["/bin/sleep", "600"])
    there = Node(tmp_path, raylet)
    yield there
    raylet.kill()
    raylet.wait()
    eventually(lambda: not there.parents())


def test_workers_are_forked_from_one_process_that_has_ray_imported(node: Node) -> None:
    for name in ("a", "b"):
        node.start_worker(name)
    parent = node.parent()
    (pid, ppid, *a), (other, _, *b) = node.note("a"), node.note("b")
    assert int(ppid) == parent
    assert pid != other
    assert [*a[:2], *b[:2]] == ["a", "a", "b", "b"], "arguments and environment are the entry's"
    assert a[2] != b[2], "each draws ids of its own"
    assert a[3] == b[3] == "True", "each leads a session"


def test_a_parent_that_was_started_for_a_jobs_worker_serves_all_jobs(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(JOB_OF_WORKER, "01000000")
    node.start_worker("a")
    environment = Path(f"/proc/{node.parent()}/environ").read_bytes().split(b"\0")
    assert f"{JOB_OF_WORKER}={ray.JobID.nil().hex()}".encode() in environment


def test_a_parent_that_was_killed_is_replaced_and_ends_with_its_raylet(node: Node) -> None:
    node.start_worker("a", "json")
    first = node.parent()
    os.kill(first, signal.SIGKILL)
    eventually(lambda: not node.parents())
    node.start_worker("b", "json", flags=())
    second = node.parent()
    assert int(node.note("b")[1]) == second != first
    node.raylet.kill()
    node.raylet.wait()
    eventually(lambda: not is_alive(second))


@ONE_SET
@pytest.mark.parametrize(
    ("code", "why"),
    [
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=[9]).start()",
            "1 threads",
        ),
        ("import ray\nray.ActorClassID.from_random()", "the same random ids"),
        ("raise ImportError('it is broken')", "it is broken"),
    ],
)
def test_ray_starts_the_worker_where_the_parent_must_not_fork(
    node: Node, code: str, why: str
) -> None:
    """No other parent is started."""
    (node.folder / "imported.py").write_text(code)
    for name in ("a", "b"):
        node.start_worker(name, "imported")
        assert node.note(name)[1] == str(os.getpid()), "the entry has become the worker"
    assert why in Path(f"{node.path}.lock").read_text()


def test_a_worker_with_another_environment_is_started_by_ray(node: Node) -> None:
    node.start_worker("a", "json", "--runtime-env-hash=7")
    assert node.note("a")[1] == str(os.getpid())
    assert node.parents() == []


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        ({}, {"RAY_RAYLET_PID": "1"}),
        ({"--raylet-name": "r"}, {}),
        ({"--raylet-name": "r", "--worker-type": "SPILL_WORKER"}, {"RAY_RAYLET_PID": "1"}),
    ],
)
def test_other_workers_are_not_forked(
    arguments: dict[str, str], environment: dict[str, str]
) -> None:
    assert socket_of(arguments, environment) is None


@contextlib.contextmanager
def stopped_parent(path: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that listens but does not answer."""
    program = (
        f"import socket; s = socket.socket(socket.AF_UNIX); s.bind({path!r}); s.listen(); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        eventually(Path(path).exists)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_parent_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    path = str(tmp_path / "forks")
    with stopped_parent(path) as parent:
        eventually(lambda: Path(f"/proc/{parent.pid}/wchan").exists())
        assert not is_forked(path, b"request", "", limit_s=0.1)
        assert parent.wait(10) == -signal.SIGKILL


def test_the_notification_of_a_forked_process_counts_until_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is forked too late can't notify, and so does not become a worker."""
    path, notified, ended = str(tmp_path / "forks"), threading.Event(), threading.Event()
    late: list[OSError] = []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()

    def parent() -> None:
        for is_in_time in (True, False):
            connection, _ = listener.accept()
            with connection:
                if is_in_time:
                    assert notified.wait(10)
                    connection.sendall(worker_entry.FORKED)
                    ended.set()
                    continue
                try:
                    while True:
                        assert ended.wait(10)
                        connection.sendall(worker_entry.FORKED)
                except OSError as error:
                    late.append(error)

    thread = threading.Thread(target=parent)
    thread.start()

    def end(_: socket.socket) -> None:
        """The limit has passed, and the notification arrives at the last moment."""
        notified.set()
        assert ended.wait(10)

    monkeypatch.setattr(worker_entry, "_end", end)
    with listener:
        assert is_forked(path, b"", "", limit_s=0.05)
        ended.clear()
        monkeypatch.setattr(worker_entry, "_end", lambda _: None)
        assert not is_forked(path, b"", "", limit_s=0.05)
        ended.set()
        thread.join(10)
    assert isinstance(late[0], BrokenPipeError)
