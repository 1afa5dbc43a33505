"""Roles of a script on a real Ray: their own commands and slots, servers that never exit, and a
worker that restarts alone."""

from __future__ import annotations

from pathlib import Path

from dray import Client
from dray.views import JobState
from tests.integration.harness import eventually, training_pids

COMMON = """
import json, os, signal, socket, sys, time

config = json.loads(os.environ["TF_CONFIG"])

def place(role):
    host, port = config["cluster"][role][0].rsplit(":", 1)
    return host, int(port)

def connected(role):
    while True:
        try:
            return socket.create_connection(place(role))
        except ConnectionRefusedError:
            time.sleep(0.05)
"""
SERVES = """
with socket.create_server(place("ps")) as server:
    while True:
        client, _ = server.accept()
        client.sendall(" ".join(sys.argv[1:]).encode())
        client.close()
"""
COORDINATES = """
answer = connected("ps").recv(100).decode()
print("answer", answer, config["task"], os.environ["ROLE_NAME"], sys.argv[1:], flush=True)
with socket.create_server(place("chief")) as server:
    for _ in range(2):
        client, _ = server.accept()
        print("worker", client.recv(100).decode(), flush=True)
print("worker listens again", connected("worker").recv(100).decode(), flush=True)
"""
WORKS = """
started = os.environ["TORCHELASTIC_RESTART_COUNT"]
print("started again:", started, flush=True)
connected("chief").sendall(started.encode())
if started == "0":
    os.kill(os.getpid(), signal.SIGKILL)
with socket.create_server(place("worker")) as server:
    while True:
        server.accept()[0].sendall(b"at its address")
"""


def test_a_job_with_roles_goes_on_without_a_worker_and_ends_with_its_chief(
    client: Client, tmp_path: Path
) -> None:
    for name, text in (("serves", SERVES), ("coordinates", COORDINATES), ("works", WORKS)):
        (tmp_path / f"{name}.py").write_text(COMMON + text)
    roles = {
        "chief": {},
        "worker": {"entrypoint": str(tmp_path / "works.py")},
        "ps": {
            "entrypoint": str(tmp_path / "serves.py"),
            "args": ["the", "weights"],
            "resources": {},
        },
    }
    job = client.submit(
        {
            "name": "roles",
            "script": {
                "entrypoint": str(tmp_path / "coordinates.py"),
                "args": ["--lr", "1"],
                "framework": "tensorflow",
                "roles": roles,
            },
            "max_retries": 0,
        }
    )
    assert (job.spec["resources"]["num_workers"], job.world_size) == (3, 3)
    done = client.wait(job.id, timeout_s=90)
    assert done.state is JobState.SUCCEEDED, done.reason
    assert (done.attempt, done.world_size, done.recoveries) == (1, 3, 1)
    assert [line.text for line in client.logs(job.id, 0)] == [
        "answer the weights {'type': 'chief', 'index': 0} chief ['--lr', '1']",
        "worker 0",
        "worker 1",
        "worker listens again at its address",
    ]
    assert [line.text for line in client.logs(job.id, 1)] == [
        "started again: 0",
        "started again: 1",
    ]
    lost = [event for event in client.events(job.id) if event.code == "group_lost"]
    assert [(event.data["ranks"], event.message) for event in lost] == [
        ([1], "rank 1 (worker 0) was killed by SIGKILL; the other ranks continue")
    ]
    eventually(lambda: not training_pids(job.id), why="the server was left")
