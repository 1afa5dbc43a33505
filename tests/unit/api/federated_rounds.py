"""A federated job with clients outside the cluster: the real loop of its rank, the real API, and
real clients, all in the test's process."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from dray import Client
from dray.spec import JobSpec
from dray.train.checkpoints import CheckpointRef
from dray.views import JobState
from ray_workers.datasets.formats import toy_datasets
from ray_workers.recipes import RECIPES
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import Cause, Frame, FrameKind
from ray_workers.shared.heartbeat import HeartbeatPage
from ray_workers.shared.names import attempt_prefix
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.loop.run import run
from tests.unit.api.serving import DEADLINE_S, LiveServer
from tests.wire import rank_task

DOCUMENT: dict[str, Any] = {
    "recipe": "tabular_classification",
    "model": {"name": "mlp", "width": 8},
    "data": {"source": "sklearn://wine"},
    "train": {"optimizer": {"name": "sgd", "lr": 0.05}},
    "federated": {
        "clients": 3,
        "clients_per_round": 3,
        "rounds": 3,
        "quorum": 2,
        "batch_size": 16,
        "deadline_s": 60,
        "http": {},
    },
}


class RankKilled(BaseException):
    """The rank is gone, as after SIGKILL: nothing in it continues."""


@dataclass
class FederatedRun:
    """A job on a live server. Its rank runs in the thread that calls `train`."""

    server: LiveServer
    home: Path
    document: dict[str, Any] = field(default_factory=lambda: DOCUMENT)
    attempt: int = 0
    checkpoints: list[CheckpointRef] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with Client(self.server.url) as client:
            self.job_id = client.submit(self.document).id
            count = self.document["federated"]["clients"]
            self.tokens = [one.token for one in client.invite_clients(self.job_id, count)]

    def train(self, monkeypatch: Any, **fields: Any) -> None:
        """Run an attempt, from its claim to the end of its rank. Its reports reach the service as
        they are written. Raises whatever the rank raises."""
        assert self.server.hands.claim(self.job_id, self.attempt) is not None
        self.attempt += 1
        spool = self.home / f"spool-{self.attempt}" / spool_reader.spool_key(0, 0, "metrics")
        spool.mkdir(parents=True)
        monkeypatch.setenv("DRAY_SPOOL_DIR", str(spool))
        base = f"{self.server.hands.storage.url}/{attempt_prefix(self.job_id, self.attempt)}"
        monkeypatch.setenv("DRAY_ARTIFACT_URL", f"{base}/artifacts")
        spec = JobSpec.model_validate(self.document)
        task = rank_task(
            job_id=self.job_id,
            attempt=self.attempt,
            spec=self.document,
            spool_dir=str(spool),
            checkpoint_url=f"{base}/checkpoints",
            artifact_url=f"{base}/artifacts",
            folder_url=f"{self.server.hands.storage.url}/jobs/{self.job_id}/checkpoint-folder",
            resume_from=tuple(reversed(self.checkpoints)),
            **fields,
        )
        assert spec.recipe is not None
        workload = RECIPES[spec.recipe].build(spec, DataPolicy.open())
        with self._reports(spool):
            run(task, spec, workload, HeartbeatPage(None))

    @contextmanager
    def _reports(self, spool: Path) -> Iterator[None]:
        """Pass on what is in the spool to the service, as the supervisor and reconciler do."""
        over = threading.Event()

        def bring() -> None:
            offset, is_last = 0, False
            while not is_last:
                is_last = over.wait(0.01)
                data = spool_reader.read(spool, offset, 1 << 20)
                offset += len(data)
                if frames := list(spool_reader.decode(spool.name, data)):
                    self._note(frames)
                    self.server.hands.report(self.job_id, self.attempt, frames)

        reporting = threading.Thread(target=bring)
        reporting.start()
        try:
            yield
        finally:
            over.set()
            reporting.join(DEADLINE_S)

    def _note(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            body = frame.body
            if frame.kind is FrameKind.CHECKPOINT:
                ref = CheckpointRef(body["url"], body["step"], body["manifest_sha256"])
                self.checkpoints.append(ref)
            if frame.kind is FrameKind.METRICS:
                self.metrics.setdefault(body["step"], {}).update(body["values"])

    def end(self, cause: Cause = Cause.SUCCEEDED) -> None:
        self.server.hands.end(self.job_id, self.attempt, cause, "it ended")

    def weights(self) -> dict[str, torch.Tensor]:
        prefix = attempt_prefix(self.job_id, self.attempt)
        path = self.server.hands.storage.local_path(f"{prefix}/artifacts/model.safetensors")
        assert path is not None
        return load_file(path)


class Clients:
    """Clients of a run, each in its own thread and with its own table."""

    def __init__(self, job: FederatedRun, folder: Path) -> None:
        self._job = job
        self._tables = tables(folder, len(job.tokens))
        self.said: list[list[str]] = [[] for _ in job.tokens]
        self.states: list[JobState | BaseException | None] = [None for _ in job.tokens]
        self._threads: list[threading.Thread] = []

    def join(self, *numbers: int) -> None:
        for number in numbers:
            thread = threading.Thread(target=self._take_part, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _take_part(self, number: int) -> None:
        try:
            with Client(self._job.server.url, token=self._job.tokens[number]) as client:
                told = self.said[number].append
                table = self._tables[number]
                self.states[number] = client.join(self._job.job_id, table, on_round=told)
        except BaseException as error:
            self.states[number] = error

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def tables(folder: Path, count: int) -> list[Path]:
    """The wine data set, split into this many files."""
    whole = toy_datasets.table("wine", classifies=True)
    assert whole.classes is not None
    found = []
    for number in range(count):
        path = folder / f"private-{number}.csv"
        with path.open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow([*whole.numeric_names, whole.target_name])
            for row, answer in zip(
                whole.numeric[number::count].tolist(), whole.target[number::count], strict=True
            ):
                lines.writerow([*row, whole.classes[answer]])
        found.append(path)
    return found
