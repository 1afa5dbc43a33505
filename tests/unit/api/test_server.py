"""`python -m api` as a process: what it prints, what it refuses, and how it stops."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.__main__ import _unless_stopped
from tests.marks import soak_but
from tests.unit.api.serving import Refused

ROOT = Path(__file__).resolve().parents[3]


def command(home: Path, **environment: str) -> subprocess.Popen[str]:
    """Run the server on its own port, without loops and thus without Ray."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("DRAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "api", "--no-loops"],
        cwd=ROOT,
        env={**clean, "DRAY_HOME": str(home), "DRAY_PORT": "0", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refusal(process: subprocess.Popen[str]) -> str:
    """Return the output of a server that can't start, which must be a sentence instead of a
    traceback."""
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1, said
    assert "Traceback" not in said
    return said


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = command(tmp_path / "home")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line or process.communicate(timeout=120)[1]
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def submit(url: str) -> str:
    """Submit a job whose long poll and stream will be open when the server stops."""
    response = httpx.post(f"{url}/v1/jobs", json={"recipe": "image_classification"}, timeout=30)
    job_id: str = response.json()["id"]
    return job_id


@pytest.mark.parametrize(
    "number", soak_but([signal.SIGTERM, signal.SIGINT], short=[signal.SIGTERM])
)
def test_it_says_where_it_is_and_stops_in_order_though_somebody_waits(
    running: tuple[subprocess.Popen[str], str], number: signal.Signals
) -> None:
    process, url = running
    job_id = submit(url)
    answers: list[int] = []
    asked, streaming = threading.Event(), threading.Event()

    def tell(event: str, _: object) -> None:
        if event == "http11.send_request_body.complete":
            asked.set()

    def poll() -> None:
        with httpx.Client(timeout=70) as client:
            response = client.get(
                f"{url}/v1/jobs/{job_id}",
                params={"wait_s": 60, "state": "QUEUED"},
                extensions={"trace": tell},
            )
        answers.append(response.status_code)

    def stream() -> None:
        with httpx.stream(
            "GET",
            f"{url}/v1/jobs/{job_id}/events",
            headers={"Accept": "text/event-stream"},
            timeout=70,
        ) as response:
            for _ in response.iter_lines():
                streaming.set()
        answers.append(response.status_code)

    threads = [threading.Thread(target=poll), threading.Thread(target=stream)]
    threads[0].start()
    assert asked.wait(30)
    threads[1].start()
    # The server accepted the poll's connection first, so once it is streaming, it has both.
    assert streaming.wait(30)
    process.send_signal(number)
    assert process.wait(30) == 0, "half of what the poll would wait"
    for thread in threads:
        thread.join(30)
    assert answers == [200, 200]


def test_it_does_not_listen_to_others_without_tokens(tmp_path: Path) -> None:
    said = refusal(command(tmp_path, DRAY_HOST="0.0.0.0"))
    assert "DRAY_TOKENS_FILE" in said


def test_it_does_not_start_with_a_tokens_file_that_is_missing(
    refused: Refused, tmp_path: Path
) -> None:
    path = str(tmp_path / "none")
    assert path in refused(tmp_path, DRAY_HOST="0.0.0.0", DRAY_TOKENS_FILE=path)


def test_it_says_so_when_its_port_is_taken(refused: Refused, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused(tmp_path, DRAY_PORT=port)
    assert port in said
    assert "DRAY_PORT" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DRAY_DATABASE_URL", "mysql://x/y"),
        ("DRAY_PORT", "many"),
        ("DRAY_SCHEDULER_TICK_S", "0"),
        ("DRAY_DATA_PRIVATE_HOSTS", "127.0.0.1:8600"),
    ],
)
def test_a_setting_that_is_wrong_is_named(
    refused: Refused, tmp_path: Path, name: str, value: str
) -> None:
    assert name in refused(tmp_path, **{name: value})


@pytest.mark.parametrize("asked_to_stop", [True, False])
async def test_what_was_being_started_when_the_stop_came_is_stopped_too(
    asked_to_stop: bool,
) -> None:
    stopped: list[str] = []
    stop, may_open = asyncio.Event(), asyncio.Event()

    class Opened:
        async def stop(self) -> None:
            stopped.append("runtime")

    async def opens() -> Any:
        await may_open.wait()
        return Opened()

    deciding = asyncio.create_task(_unless_stopped(asyncio.create_task(opens()), stop))
    if asked_to_stop:
        stop.set()
    may_open.set()
    runtime = await deciding
    assert (runtime is None) is asked_to_stop
    assert stopped == (["runtime"] if asked_to_stop else [])
