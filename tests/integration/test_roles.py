"""Roles of a script on a real Ray: ranks with commands of their own, and servers that never end."""

from __future__ import annotations

from pathlib import Path

from dray import Client
from dray.views import JobState
from tests.integration.harness import eventually, training_pids

SERVES = """
import json, os, socket, sys

config = json.loads(os.environ["TF_CONFIG"])
host, port = config["cluster"]["ps"][config["task"]["index"]].rsplit(":", 1)
with socket.create_server((host, int(port))) as server:
    while True:
        client, _ = server.accept()
        client.sendall(" ".join(sys.argv[1:]).encode())
        client.close()
"""
ASKS = """
import json, os, socket, sys, time

config = json.loads(os.environ["TF_CONFIG"])
host, port = config["cluster"]["ps"][0].rsplit(":", 1)
while True:
    try:
        answer = socket.create_connection((host, int(port))).recv(100).decode()
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
print("answer", answer, config["task"], os.environ["ROLE_RANK"], sys.argv[1:], flush=True)
"""


def test_a_job_with_a_server_ends_with_its_workers(client: Client, tmp_path: Path) -> None:
    (tmp_path / "serves.py").write_text(SERVES)
    (tmp_path / "asks.py").write_text(ASKS)
    roles = {
        "worker": {"num_workers": 2},
        "ps": {"entrypoint": str(tmp_path / "serves.py"), "args": ["the", "weights"]},
    }
    job = client.submit(
        {
            "name": "roles",
            "script": {
                "entrypoint": str(tmp_path / "asks.py"),
                "args": ["--lr", "1"],
                "framework": "tensorflow",
                "roles": roles,
            },
            "max_retries": 0,
        }
    )
    assert job.spec["resources"]["num_workers"] == 3
    done = client.wait(job.id, timeout_s=90)
    assert done.state is JobState.SUCCEEDED, done.reason
    said = sorted(line.text for line in client.logs(job.id) if line.text.startswith("answer"))
    assert said == [
        f"answer the weights {{'type': 'worker', 'index': {rank}}} {rank} ['--lr', '1']"
        for rank in range(2)
    ]
    eventually(lambda: not training_pids(job.id), why="the server was left")
