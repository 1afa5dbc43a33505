"""A server with jobs in every state, for the tests of the page, for its pictures, and to look at:

python -m tests.page.site [--jobs N] [--live]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import math
import random
import tempfile
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image
from sqlalchemy import update

from dray.experiment_requests import ExperimentRequest
from dray.requests import AnnotationRequest
from dray.reservations import ReservationRequest
from ray_workers.shared.contracts import AttemptSpec, Cause, Frame, FrameKind, Phase, Slice
from ray_workers.shared.names import attempt_prefix
from ray_workers.shared.quarantine import Quarantined
from service.cluster.port import ClusterNode, ClusterSnapshot
from service.db.models import ForecastRow, JobRow
from service.db.repositories import jobs
from service.lifecycle import claims
from service.nodes import node_table
from service.queues.reservations import Reservations
from service.tracking.experiments import Experiments
from service.tracking.service import Tracking
from tests.unit.api.serving import LiveServer, serving
from tests.unit.service.helpers import (
    frame,
    hang,
    log,
    metrics,
    regrouping,
    resumed,
    spec,
    spent,
    told,
)
from tests.wire import cluster_node

T = TypeVar("T")
EVIL = '<img src=x onerror="document.title=1">'
"""A name that would run as code if the page treated it as markup."""
PRICES = (
    "currency: EUR\nprices: [{resource: GPU, per_hour: 2.5}, {resource: CPU, per_hour: 0.05}]\n"
)
NODES = ("gpu-a", "gpu-b", "gpu-c", "cpu-a")
GPUS = {"CPU": 64.0, "GPU": 8.0, "memory": 512.0 * (1 << 30)}
MODELS = {"gpu-a": "H100", "gpu-b": "A100-80G", "gpu-c": "A100-80G", "gpu-d": "L40S"}
OTHER_FILES = (
    "the node can't access the service's files at file:///mnt/dray/storage: mount the same "
    "directory there, or set DRAY_STORAGE_URL to storage that all nodes share"
)
STUCK = (
    "still alive after SIGKILL: pid 48113 (python, state D); GPU 5: 18432 MiB still allocated to "
    "processes that have ended"
)
NOTES = """## What was tried

The rate of `3e-3` from the *sweep*, with **bf16** and a longer warm-up; see
[the paper](https://arxiv.org/abs/2001.08361) and https://example.org/runs?id=7.

1. Loss falls faster than in the baseline.
2. After step 300 rank 2 was killed:
   - recovered in 0.41 s
   - _no_ step was lost

| rate | val/loss |
|---|---|
| 1e-3 | 0.61 |
| 3e-3 | **0.52** |
"""
STACK = """Thread 0x7f21 (most recent call first):
  File "train.py", line 88, in next_batch
  File "train.py", line 132, in main"""
NAMES = ("resnet50-sweep", "gpt-small", "unet-cells", "tabular-churn", "vit-finetune", "llm-7b-sft")
OWNERS = ("ann", "bert", "chen", "dora")


def picture(number: int) -> bytes:
    """A PNG of 64 pixels a side."""
    shades = bytes((x * y * (number + 1) // 8) % 256 for y in range(64) for x in range(64))
    written = io.BytesIO()
    Image.frombytes("L", (64, 64), shades).save(written, "PNG")
    return written.getvalue()


def gpu_node(name: str, **fields: Any) -> ClusterNode:
    """A node with GPUs, as Ray describes it."""
    resources = {**GPUS, f"accelerator_type:{MODELS[name]}": 1.0}
    labels = {"ray.io/accelerator-type": MODELS[name]}
    free = {**resources, "GPU": 3.0, "CPU": 40.0}
    plain = {"hostname": f"{name}.example", "labels": labels, "available": free}
    return cluster_node(name, resources, **{**plain, **fields})


def loss_at(step: int, seed: int = 0, floor: float = 0.4) -> float:
    noise = random.Random(step * 7919 + seed).gauss(0, 0.06)
    return floor + 2.4 * math.exp(-step / 350) + noise * math.exp(-step / 1500)


def run(doing: Coroutine[Any, Any, T]) -> T:
    """Run it in another thread: in this one, a browser's driver may have its own event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, doing).result()


class Site:
    """A server, and the reports of a cluster to it."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.hands = server.hands
        self.tracking = Tracking(self.hands.database)
        self.experiments = Experiments(self.hands.database)

    def cluster(self, stuck: str | None = None) -> None:
        """Return four nodes with GPUs, one refused and one gone, and one node without. `stuck`: a
        job that has left a process on the second node."""
        left = ()
        if stuck is not None:
            since = (self.hands.now - timedelta(minutes=12)).timestamp()
            left = (Quarantined(stuck, 1, 2, {"GPU": 2.0, "CPU": 8.0}, STUCK, since),)
        nodes = (
            gpu_node("gpu-a"),
            gpu_node("gpu-b", quarantined=left),
            gpu_node("gpu-c", accepted=False, problem=OTHER_FILES),
            gpu_node("gpu-d", alive=False, accepted=False),
            cluster_node(
                "cpu-a",
                {"CPU": 32.0},
                hostname="cpu-a.example",
                full="the disk of /var/lib/dray is full: 112 MiB free",
            ),
        )
        seen = ClusterSnapshot("session-1", "ray://x", "http://127.0.0.1:8265", False, nodes)
        self.hands.database.write_sync(
            lambda session: node_table.store(session, seen, None, self.hands.now)
        )

    def reserve(self, name: str, node: str, in_hours: float, **whose: Any) -> None:
        """Reserve the node for two hours."""
        begin_at = (datetime.now(UTC) + timedelta(hours=in_hours)).isoformat()
        document = {"name": name, "nodes": [f"{node}.example"], "begin_at": begin_at, **whose}
        wanted = ReservationRequest.model_validate({**document, "duration_s": 7200})
        run(Reservations(self.hands.database).create(wanted))

    def submit(self, name: str, workers: int = 2, owner: str = "ann", **fields: Any) -> str:
        resources = {"num_workers": workers, **fields.pop("resources", {})}
        document = spec(name=name, resources=resources, **fields)
        submitting = self.hands.jobs.submit(document, owner=owner, project="default")
        job, _ = run(submitting)
        return job.id

    def annotate(self, job_id: str, **changes: Any) -> None:
        """Change tags and notes as another user."""
        wanted = AnnotationRequest.model_validate(changes)
        run(self.tracking.annotate(job_id, wanted, actor="bert"))

    def checkpoint(self, job_id: str, attempt: int, step: int, **values: float) -> Frame:
        body = {
            "step": step,
            "url": self.hands.url(job_id, attempt, f"checkpoints/step-{step}"),
            "size_bytes": 48 << 20,
            "manifest_sha256": hashlib.sha256(b"").hexdigest(),
            "metrics": values,
        }
        return frame(FrameKind.CHECKPOINT, body, at=self.hands.now)

    def artifact(self, job_id: str, attempt: int, path: str, content: bytes) -> Frame:
        """Store a file where a rank would, and send the frame that reports it."""
        key = f"{attempt_prefix(job_id, attempt)}/artifacts/{path}"
        self.hands.storage.write_bytes(key, content)
        body = {
            "path": path,
            "url": self.hands.storage.url_of(key),
            "size_bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        return frame(FrameKind.ARTIFACT, body, at=self.hands.now)

    def claim(self, job_id: str, node: str = "gpu-a", workers: int = 2) -> int:
        """Give the job slots; returns the number of its attempt."""

        def work(session: Any) -> list[AttemptSpec | None]:
            row = jobs.get(session, job_id)
            assert row is not None
            uses = {"CPU": 4.0, "GPU": 1.0} if node.startswith("gpu") else {"CPU": 1.0}
            wanted = claims.Wanted(job_id, row.attempt, row.queue, (Slice(node, workers),), uses)
            return claims.claim(session, [wanted], self.hands.deployment, self.hands.now)

        (claimed,) = self.hands.database.write_sync(work)
        assert claimed is not None
        return claimed.attempt

    def steps(
        self, first: int, last: int, *, total: int, seed: int = 0, rank: int = 0, every: int = 5
    ) -> list[Frame]:
        """Report steps as a rank does."""
        frames = []
        for step in range(first, last + 1, every):
            values = {
                "train/loss": loss_at(step, seed),
                "train/lr": 3e-3 * (1 + math.cos(math.pi * step / total)) / 2,
                "train/grad_norm": 0.5 + 3 * math.exp(-step / 200) + 0.4 * (step % 35 == 1),
                "perf/step_time_s": 0.2 + 0.02 * math.sin(step / 9) + 0.01 * rank,
                "perf/data_wait_s": 0.004 + 0.02 * (step % 50 == 1),
            }
            if step % 50 == 1:
                values["val/loss"] = loss_at(step, seed + 1, 0.5)
                values["val/accuracy"] = 0.96 - 0.7 * math.exp(-step / 300)
            more = {"total_steps": total, "epoch": step // 100, "samples_per_s": 640.0}
            frames.append(metrics(step, values, rank=rank, at=self.hands.now, **more))
        return frames

    def lines(self, count: int, rank: int = 0, first: int = 0) -> list[Frame]:
        texts = []
        for n in range(count):
            texts.append(f"step {n * 5:6d}  loss {loss_at(n * 5):.4f}  lr 2.9e-03  0.21 s")
        texts[1:1] = [
            "\x1b[1;32mready\x1b[0m on \x1b[36mcuda:0\x1b[0m, \x1b[4mtorch 2.11\x1b[24m",
            f"loading {EVIL}",
            "\x1b]0;a title\x07\x1b[2J\x1b[31mwarning\x1b[39m: the cache is cold\x1b[0m",
        ]
        return [log(first + n, text, rank=rank, at=self.hands.now) for n, text in enumerate(texts)]

    def uses(self, num_ranks: int = 4) -> list[Frame]:
        """Report a sample of ranks that use one GPU each, and of their node."""
        at = self.hands.now
        turn = at.timestamp() / 300
        samples = []
        for rank in range(num_ranks):
            values = {
                "system/cpu": 1.6 + 0.4 * math.sin(turn + rank),
                "system/memory_rss": (3.1 + 0.1 * rank) * (1 << 30),
                "system/gpu/0/utilization": 0.9 + 0.05 * math.sin(3 * turn + rank),
                "system/gpu/0/memory_used": (18.0 + rank) * (1 << 30),
                "system/gpu/0/power_w": 310.0 + 40 * math.sin(2 * turn + rank) + 9 * rank,
                "system/gpu/0/temperature_c": 58.0 + 3 * rank + 4 * math.sin(turn + rank),
            }
            if rank == 0:
                values["system/node/cpu"] = 8.5 + math.sin(turn)
                values["system/node/network_received"] = 4e7 * (1.2 + math.sin(2 * turn))
            samples.append({"ranks": [rank], "values": {k: [v] for k, v in values.items()}})
        body = {"time": int(at.timestamp()), "columns": samples}
        return [told(FrameKind.SYSTEM_METRICS, body, at=at)]

    def eventful(self) -> str:
        """A job with two attempts, a fault that it recovered from, and everything else to see."""
        hands = self.hands
        labels = {"team": "nlp", "experiment": "lr"}
        job_id = self.submit("gpt-small-pretrain", 4, owner="chen", labels=labels)
        self.claim(job_id, "gpu-a", 4)
        hands.advance(6)
        hands.report(job_id, 1, [resumed(0), *self.lines(30)], phase=Phase.RUNNING)
        for rank in (1, 2, 3):
            hands.report(job_id, 1, [*self.steps(1, 400, total=2000, seed=rank, rank=rank)])
        for begin in range(1, 400, 100):
            hands.advance(60)
            hands.report(job_id, 1, [*self.steps(begin, begin + 99, total=2000), *self.uses()])
        hands.report(job_id, 1, [self.checkpoint(job_id, 1, 300)])
        hands.advance(5)
        hands.report(job_id, 1, [regrouping(2, message="rank 2 was killed by SIGKILL")])
        hands.advance(1)
        again = {"generation": 1, "ranks": [2], "step": 250, "steps_lost": 0, "world_size": 4}
        hands.report(job_id, 1, [told(FrameKind.REGROUPED, {**again, "recovery_s": 0.41})])
        hands.report(job_id, 1, [hang(1, num_ranks=4, stack=STACK)])
        hands.report(job_id, 1, self.lines(20, rank=1))
        used = {"useful": 980.0, "starting": 24.0, "recovering": 6.0, "data_wait": 40.0}
        hands.report(job_id, 1, [spent(at=hands.now, **used, checkpointing=22.0)])
        hands.advance(30)
        hands.end(job_id, 1, Cause.NODE_LOST, "the node gpu-a vanished")
        hands.advance(40)
        self.claim(job_id, "gpu-b", 4)
        hands.advance(4)
        hands.report(job_id, 2, [resumed(300)], phase=Phase.RUNNING)
        for begin in range(301, 1100, 100):
            hands.advance(60)
            for rank in range(4):
                steps = self.steps(begin, begin + 99, total=2000, seed=rank, rank=rank)
                hands.report(job_id, 2, steps)
            hands.report(job_id, 2, self.uses())
        hands.report(job_id, 2, [self.checkpoint(job_id, 2, 900)])
        hands.report(job_id, 2, self.lines(200))
        samples = [self.artifact(job_id, 2, f"samples/{n}.png", picture(n)) for n in range(6)]
        notes = self.artifact(job_id, 2, "notes.txt", b"hello\n" * 50)
        hands.report(job_id, 2, [*samples, notes])
        used = {"useful": 2600.0, "recomputed": 300.0, "starting": 60.0, "recovering": 6.0}
        hands.report(job_id, 2, [spent(at=hands.now, **used, data_wait=90.0, idle=20.0)])
        return job_id

    def trains(self, name: str, seed: int = 0, node: str = "gpu-b", **fields: Any) -> str:
        """A job that is running."""
        job_id = self.submit(name, **fields)
        self.claim(job_id, node)
        at = 200 + 37 * (seed % 9)
        frames = [resumed(0), *self.steps(1, at, total=1000, seed=seed), *self.lines(10)]
        frames.append(spent(at=self.hands.now, useful=400.0 + seed, starting=9.0, idle=30.0))
        self.hands.report(job_id, 1, frames)
        return job_id

    def ended(self, name: str, cause: Cause, seed: int = 0, **fields: Any) -> str:
        job_id = self.trains(name, seed, **fields)
        self.hands.advance(30)
        said = "trained to its end" if cause is Cause.SUCCEEDED else "rank 0 raised ValueError: bad"
        model = self.artifact(job_id, 1, "model.safetensors", bytes(1000))
        self.hands.end(job_id, 1, cause, said, [model])
        return job_id

    def waits(self, name: str, position: int, **fields: Any) -> str:
        job_id = self.submit(name, **fields)
        now = self.hands.now
        expected = now + timedelta(minutes=7 * position)
        values = {"position": position, "reason_code": "waiting_for_slots"}
        values["reason_message"] = "it needs 2 slots with 1 GPU; 1 is free, on gpu-a"
        forecast = ForecastRow(
            job_id=job_id,
            attempt=1,
            of="start",
            expected_at=expected,
            earliest_at=expected,
            latest_at=expected + timedelta(minutes=2 * position),
            num_assumed=0,
            made_at=now,
            first_expected_at=expected,
            first_made_at=now,
        )

        def work(session: Any) -> None:
            session.execute(update(JobRow).where(JobRow.id == job_id).values(**values))
            session.add(forecast)

        self.hands.database.write_sync(work)
        return job_id

    def sweep(self, num_trials: int = 12) -> str:
        """A sweep whose last trial still waits, and of whose others one has failed; its id."""
        parameters = {
            "train.optimizer.lr": {"min": 1e-4, "max": 1e-1, "log": True},
            "train.optimizer.name": ["sgd", "adamw"],
            "model.width": {"min": 8, "max": 32, "step": 8},
        }
        wanted = {"metric": "val/accuracy", "trials": num_trials, "parameters": parameters}
        fields = {"resources": {"num_workers": 1}, "max_retries": 0, "sweep": wanted}
        document = spec(name="digits-sweep", **fields)
        first, _ = run(self.hands.jobs.submit(document, owner="ann", project="default"))
        sweep_id = first.array_id
        assert sweep_id is not None
        trials = run(self.hands.jobs.sweeps.trials(sweep_id, limit=num_trials, cursor=None)).items
        for trial in trials[:-1]:
            assert trial.parameters is not None
            off = math.log10(trial.parameters["train.optimizer.lr"] / 5e-3)
            reached = 0.97 - 0.08 * off * off - 0.8 / trial.parameters["model.width"]
            self.claim(trial.job_id, "cpu-a", 1)
            cause = Cause.USER_ERROR if trial.index == 3 else Cause.SUCCEEDED
            frames = [metrics(50, {"val/accuracy": reached}, at=self.hands.now)]
            self.hands.end(trial.job_id, 1, cause, "its end", [resumed(0), *frames])
        return sweep_id

    def many(self, count: int) -> None:
        """Submit this many waiting jobs, the content of a long list."""
        for number in range(count):
            queue = "nightly" if number % 3 == 0 else "default"
            name = f"{NAMES[number % len(NAMES)]}-{number:04d}"
            labels = {"team": "vision" if number % 2 else "nlp"}
            self.submit(name, owner=OWNERS[number % 4], queue=queue, labels=labels)

    def everything(self, count: int = 40) -> str:
        """Submit jobs in every state; returns the id of the most detailed one."""
        self.hands.now = datetime.now(UTC) - timedelta(minutes=25)
        self.cluster()
        run(self.hands.queue("nightly", weight=2.0, max_running=4))
        self.reserve("course", "gpu-a", 30, users=["ann", "bert"], queues=["nightly"])
        self.reserve("disks", "cpu-a", 0, maintenance=True)
        self.many(count)
        rates: list[str] = []
        for number, owner in enumerate(OWNERS):
            fields = {"owner": owner, "labels": {"team": "vision", "experiment": "rates"}}
            fields["train"] = {"optimizer": {"lr": 1e-3 * (number + 1)}, "epochs": 10}
            rates.append(self.ended(f"baseline-{owner}", Cause.SUCCEEDED, number, **fields))
        wanted = ExperimentRequest.model_validate({"baseline": rates[1]})
        run(self.experiments.change("rates", wanted))
        self.annotate(rates[0], add_tags=["good"], notes=NOTES)
        diverging = self.ended("diverging-lr", Cause.USER_ERROR, 5, max_retries=0)
        run(self.hands.jobs.cancel(self.submit("not-needed"), actor="ann"))
        for number in range(4):
            fields = {"queue": "nightly" if number % 2 else "default"}
            self.trains(f"unet-cells-{number}", number, "gpu-a", **fields)
        self.claim(self.submit("vit-finetune"), "cpu-a")
        self.sweep()
        job_id = self.eventful()
        for number in range(1, 6):
            self.waits(f"llm-7b-sft-{number}", number, resources={"gpus_per_worker": 1})
        self.waits(EVIL, 6)
        self.hands.now = datetime.now(UTC)
        self.cluster(stuck=diverging)
        return job_id


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--live", action="store_true", help="train on, a step a second")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "prices.yaml").write_text(PRICES)
        with serving(
            home / "home", prices_file=home / "prices.yaml", port=arguments.port
        ) as server:
            site = Site(server)
            job_id = site.everything(arguments.jobs)
            print(f"{server.url}/#/jobs/{job_id}", flush=True)
            step = 1101
            while True:
                time.sleep(1)
                site.hands.advance(1)
                if arguments.live:
                    site.hands.report(job_id, 2, site.steps(step, step + 4, total=2000))
                    step += 5
                    if step % 50 == 1:
                        site.hands.report(job_id, 2, site.uses())


if __name__ == "__main__":
    main()
