"""A real server on its own port, in a thread. The test does the work of the loops."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import uvicorn
from sqlalchemy.orm import Session

from api.app import create_app
from api.context import Context
from api.http import connections
from api.http.limits import Limits
from dray.views import JobState
from ray_workers.shared.contracts import Cause, Frame, FrameKind
from ray_workers.shared.names import attempt_prefix
from service.config.settings import Settings
from service.db.notifications import events_of
from service.db.repositories import jobs
from service.db.repositories.scheduling import forecasts
from service.domain.scheduling.outlook.situation import Situation
from service.outlook import codec
from tests.databases import migrated_sqlite
from tests.unit.service.helpers import Service

Refused = Callable[..., str]
"""(home, environment variables) -> the output of a server that can't start."""
DEADLINE_S = 60.0
"""A time limit that is never reached if things work, even on a slow machine."""


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Return once `condition` is true. If that takes too long, fail the test with a message about
    `what`."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.01)


class LiveServer:
    """A server with its URL, and helpers that do what the scheduler and the reconciler would do."""

    def __init__(self, settings: Settings, *, port: int = 0, **limits: float) -> None:
        self.settings = settings
        self.app = create_app(settings, loops=False)
        changed: Any = limits
        bounds = replace(Limits.of(settings), **changed)
        proxies = settings.forwarded_allow_ips or ()
        config = connections.config(self.app, bounds, stop_within_s=5, proxies=proxies)
        config.port = port
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve()

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive(), "the server")
        assert self._server.started, "the server did not start"
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        runtime = self.context.runtime
        prices = {"prices_file": self.settings.prices_file}
        self.hands = Service(runtime.database, runtime.storage, self.settings.home, **prices)
        self.hands.now = datetime.now(UTC)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the server did not stop"

    def await_(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's event loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE_S)

    def ask_to_stop(self) -> None:
        """Do the first thing that a signal does: waiting calls are then answered."""
        self._loop.call_soon_threadsafe(self.context.stopping.set)

    def num_waiting(self, job_id: str) -> int:
        """Return how many long polls and streams are waiting for events of the job."""
        waiting = self.context.runtime.signals._subscribers
        return sum(len(waiting.get(topic, ())) for topic in (job_id, events_of(job_id)))

    @property
    def context(self) -> Context:
        found: Context = self.app.state.context
        return found

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, trust_env=False, timeout=DEADLINE_S, **options)

    def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Make a call over a new connection, without a token."""
        with self.client() as client:
            return client.request(method, path, **options)

    def submit(self, **fields: Any) -> str:
        body = {"recipe": "image_classification", **fields}
        response = self.ask("POST", "/v1/jobs", json=body)
        assert response.status_code == 201, response.text
        job_id: str = response.json()["id"]
        return job_id

    def queue(self, name: str, **rules: Any) -> None:
        """Create a queue, or replace its rules."""
        response = self.ask("PUT", f"/v1/queues/{name}", json=rules)
        assert response.status_code == 200, response.text

    def train(self, job_id: str, *frames: Frame) -> None:
        """Claim the job for its first attempt and report that it is training."""
        assert self.hands.claim(job_id) is not None
        self.hands.report(job_id, 1, frames)

    def trains(self, num_workers: int = 2, step: int = 10, **fields: Any) -> str:
        """Submit a job that is training, with `step` of 100 steps done."""
        job_id = self.submit(resources={"num_workers": num_workers}, **fields)
        assert self.hands.claim(job_id, workers=num_workers) is not None
        body = {"step": step, "values": {"train/loss": 0.5}, "total_steps": 100}
        now = self.hands.now.timestamp()
        self.hands.report(job_id, 1, [Frame(0, 0, FrameKind.METRICS, now, body)])
        return job_id

    def age(self, job_id: str, seconds: float) -> None:
        """Make the job this many seconds old."""

        def work(session: Session) -> None:
            row = jobs.lock(session, job_id)
            assert row is not None
            row.created_at = datetime.now(UTC) - timedelta(seconds=seconds)

        self.hands.database.write_sync(work)

    def sees(self, situation: Situation, *, for_s: float = 0.0) -> None:
        """Store the situation, as the forecaster does. It becomes outdated `for_s` seconds
        later."""
        made_at = datetime.now(UTC) + timedelta(seconds=for_s)
        encoded = codec.encode(situation)
        self.hands.database.write_sync(lambda s: forecasts.put_situation(s, made_at, encoded))

    def state_of(self, job_id: str) -> JobState | None:
        """Return the job's state in the database."""
        return self.hands.database.read_sync(lambda s: jobs.state_of(s, job_id))

    def succeed(self, job_id: str, *frames: Frame) -> None:
        self.hands.end(job_id, 1, Cause.SUCCEEDED, "trained to its end", frames)

    def artifact(self, job_id: str, path: str, content: bytes) -> Frame:
        """Write a file as a rank would, and return the frame that reports it."""
        key = f"{attempt_prefix(job_id, 1)}/artifacts/{path}"
        self.hands.storage.write_bytes(key, content)
        body = {
            "path": path,
            "url": self.hands.storage.url_of(key),
            "size_bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        return Frame(0, 0, FrameKind.ARTIFACT, self.hands.now.timestamp(), body)


@contextmanager
def serving(
    home: Path,
    *,
    port: int = 0,
    limits: Mapping[str, float] = MappingProxyType({}),
    **settings: Any,
) -> Iterator[LiveServer]:
    database = home / "dray.db"
    if not database.exists():  # to copy a migrated database is faster than to migrate a new one
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        database.write_bytes(migrated_sqlite())
    server = LiveServer(Settings(home=home, **settings), port=port, **limits)
    server.start()
    try:
        yield server
    finally:
        server.stop()
