"""Checks of the promises for every job, whatever faults hit it. Each breach is a sentence."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from dray import Client
from dray.train.checkpoints import CheckpointRef
from dray.views import Attempt, Event, Job, JobState, Series
from ray_workers.node.forkserver.client import ForkFailed, list_tasks
from ray_workers.training.checkpoint import checkpoint_files
from ray_workers.training.checkpoint.checkpoint_files import SkippedCheckpoint
from tests.chaos import rounds
from tests.chaos.ground import Ground, patiently
from tests.chaos.kinds import Kind
from tests.integration.harness import (
    FORKSERVER_S,
    Service,
    all_metrics,
    fork_sockets,
    spools,
    supervisors_of,
    training_pids,
)

NOTHING_LEFT_WITHIN_S = 60.0
LOSS = "train/loss"
PUSH_WEIGHT_ERROR = 1e-4
WEIGHT_ERROR = 1e-4
"""Tolerance for a float32 mean of weights of about 1."""
DECLARED = frozenset({"unavailable", "database_unavailable", "storage_unavailable"})
"""Codes of the 503 responses that the API declares."""
PAUSE_S = 0.25
HOLDING = (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)


def breaches(
    ground: Ground, client: Client, job_id: str, kind: Kind, *, let_go_at: float = 0.0
) -> Iterator[str]:
    """Find breaches for a job that has ended. let_go_at: Unix time when the last stopped process
    was continued."""
    job = patiently(lambda: client.get(job_id))
    if job.id not in {each.id for each in patiently(lambda: list(client.jobs()))}:
        yield "I1: the job is not in the list"
    if job.state is not kind.ends_as:
        yield f"it ended as {job.state}, not {kind.ends_as}: {job.reason}"
    yield from of_attempts(patiently(lambda: client.attempts(job_id)))
    yield from of_events(patiently(lambda: list(client.events(job_id))))
    series = patiently(lambda: all_metrics(client, job_id))
    yield from of_series(series, job, kind)
    yield from rounds.breaches(ground, client, job, kind, series)
    if kind.is_recipe:
        yield from of_newest_checkpoint(client, job_id, kind.num_steps)
    yield from of_what_is_left(ground, job, let_go_at)


def of_attempts(attempts: list[Attempt]) -> Iterator[str]:
    """I2, according to the database. `Onlooker` checks the running processes."""
    if [each.attempt for each in attempts] != list(range(1, len(attempts) + 1)):
        yield f"I2: the attempts are numbered {[each.attempt for each in attempts]}"
    for before, after in itertools.pairwise(attempts):
        if before.finished_at is None or before.finished_at > after.created_at:
            yield f"I2: attempt {after.attempt} began before {before.attempt} ended"


def of_events(events: list[Event]) -> Iterator[str]:
    if [event.seq for event in events] != list(range(1, len(events) + 1)):
        yield f"I8: the events are numbered {[event.seq for event in events]}"
    moves = [event.to_state for event in events if event.to_state is not None]
    ends = [state for state in moves if state.is_terminal]
    if len(ends) != 1 or moves[-1] is not ends[0]:
        yield f"I4: the job moved through {[str(state) for state in moves]}"


def of_series(series: Mapping[str, Series], job: Job, kind: Kind) -> Iterator[str]:
    for key, one in series.items():
        if one.steps != sorted(set(one.steps)):
            yield f"I5: {key} has repeated or unordered steps"
    if job.state is JobState.SUCCEEDED:
        steps = series[LOSS].steps if LOSS in series else []
        if kind.reports_all and steps != list(range(1, kind.num_steps + 1)):
            missing = sorted(set(range(1, kind.num_steps + 1)) - set(steps))
            yield f"I5: {LOSS} has {len(steps)} of {kind.num_steps} steps; missing {missing[:10]}"


def of_newest_checkpoint(client: Client, job_id: str, num_steps: int) -> Iterator[str]:
    listed = patiently(lambda: client.checkpoints(job_id))
    for newest in (each for each in listed if each.is_latest):
        ref = CheckpointRef(newest.url, newest.step, newest.sha256)
        for found in checkpoint_files.load_each([ref]):
            if isinstance(found, SkippedCheckpoint):
                yield f"I6: the newest checkpoint does not load: {found.why}"
            else:
                yield from of_copies(found.state)
                yield from of_batches(found.state, newest.step, is_last=newest.step == num_steps)


def of_copies(state: Mapping[str, Any]) -> Iterator[str]:
    """I13: the model of a gossip job is the mean of all copies, and the push weights sum to their
    number."""
    if "gossip" not in state:
        return
    copies = state["gossip"]["copies"]
    total = sum(copy["push_weight"] for copy in copies)
    if abs(total - len(copies)) > PUSH_WEIGHT_ERROR:
        yield f"I13: the push weights of {len(copies)} copies sum to {total}"
    for name, value in state["model"].items():
        if value.is_floating_point():
            held = (copy["model"][name].double() * copy["push_weight"] for copy in copies)
            error = (value - sum(held) / total).abs().max().item()
            if not error < WEIGHT_ERROR:
                yield f"I13: {name} is {error} off the mean of the copies"


def of_batches(state: Mapping[str, Any], step: int, *, is_last: bool) -> Iterator[str]:
    """I13: parameter servers have counted as many batches as there were steps, and every batch at
    the end."""
    for number, (all_up_to, above) in enumerate(state.get("servers", {}).get("done", ())):
        # Each server's state is from one point in time, and server 0 defines the step.
        if number == 0 and all_up_to + len(above) != step:
            yield f"I13: {all_up_to} and {above} are not {step} batches"
        if is_last and (all_up_to, list(above)) != (step, []):
            yield f"I13: server {number} has not all of {step} batches: {all_up_to} and {above}"


def of_what_is_left(ground: Ground, job: Job, let_go_at: float) -> Iterator[str]:
    assert job.finished_at is not None
    looks: dict[str, Callable[[], object]] = {
        "processes": lambda: training_pids(job.id),
        "actors": lambda: [actor["name"] for actor in ground.service.actors(job.id)],
        "supervisors": lambda: supervisors_of(job.id),
        "placement groups": lambda: ground.placement_groups(job.id),
        "spools": lambda: spools(job.id),
    }
    since = max(job.finished_at.timestamp(), let_go_at)
    deadline = max(since + NOTHING_LEFT_WITHIN_S, time.time() + 5)
    for name, look in looks.items():
        while left := _seen(look):
            if time.time() > deadline:
                yield f"I7: {name} are left: {left}"
                break
            time.sleep(PAUSE_S)


def _seen(look: Callable[[], object]) -> object:
    try:
        return look()
    except OSError as error:  # the dashboard of a Ray that is still starting
        return f"not seen: {error}"


def of_sweep(client: Client, sweep_id: str) -> Iterator[str]:
    """Find breaches for a sweep whose trials have ended."""
    trials = patiently(lambda: list(client.trials(sweep_id)))
    best = patiently(lambda: client.sweep(sweep_id)).best
    values = {trial.job_id: trial.value for trial in trials if trial.state is JobState.SUCCEEDED}
    if None in values.values():
        yield f"a trial of {sweep_id} succeeded without a value: {values}"
    elif best is None or best.value != min(values.values(), default=None):
        yield f"the best trial of {sweep_id} is {best}, of {values}"
    for trial in trials:
        if trial.state is JobState.CANCELLED and trial.reason.code != "stopped_early":
            yield f"trial {trial.index} of {sweep_id} was cancelled: {trial.reason.message}"


@dataclass(frozen=True)
class Learned:
    """The result of a job's training, and its history."""

    weights: str
    """Hash of the weights."""
    series: Mapping[str, tuple[Sequence[int], Sequence[float | str]]]
    """Steps and values of the series selected by `Kind.repeats`."""


def learned(client: Client, job_id: str, kind: Kind) -> Learned:
    with tempfile.TemporaryDirectory() as folder:
        files = patiently(lambda: client.download(job_id, folder))
        (model,) = [path for path in files if path.name == "model.safetensors"]
        digest = hashlib.sha256(Path(model).read_bytes()).hexdigest()
    series = patiently(lambda: all_metrics(client, job_id))
    kept = {key: one for key, one in series.items() if key.startswith(kind.repeats)}
    return Learned(digest, {key: (one.steps, one.values) for key, one in kept.items()})


def of_learned(found: Learned, undisturbed: Learned) -> Iterator[str]:
    """The numbers are the same: faults only changed how long training took."""
    if found.weights != undisturbed.weights:
        yield "the weights differ from a run without faults"
    for key in sorted(found.series.keys() | undisturbed.series.keys()):
        if found.series.get(key) != undisturbed.series.get(key):
            yield f"{key} differs from a run without faults"


class Onlooker:
    """Continuously checks the service and the processes for temporary breaches."""

    def __init__(self, service: Service) -> None:
        self.breaches: list[str] = []
        self.job_ids: list[str] = []
        self.sweeps: list[str] = []
        self._service = service
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_around, daemon=True)

    def __enter__(self) -> Onlooker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look_around(self) -> None:
        with httpx.Client(base_url=self._service.url, timeout=30) as http:
            while not self._ended.wait(PAUSE_S):
                for path in ("/v1/jobs?limit=5", "/v1/cluster", *self._paths()):
                    self._ask(http, path)
                self.breaches += of_processes(live_attempts())

    def _paths(self) -> Iterator[str]:
        for job_id in list(self.job_ids):
            yield from (f"/v1/jobs/{job_id}{part}" for part in ("", "/metrics", "/explain"))
        yield from (f"/v1/sweeps/{sweep_id}" for sweep_id in list(self.sweeps))

    def _ask(self, http: httpx.Client, path: str) -> None:
        try:
            answer = http.get(path)
        except httpx.TransportError:
            return  # the service is down
        if answer.status_code >= 500 and not _is_declared(answer):
            self.breaches.append(f"I9: {path} was answered by {answer.status_code} {answer.text}")
        elif path == "/v1/cluster" and answer.status_code == 200:
            self.breaches += of_books(answer.json()["nodes"])
        elif path.startswith("/v1/sweeps/") and answer.status_code == 200:
            self.breaches += of_running_trials(answer.json())


def live_attempts() -> set[tuple[str, int]]:
    """Return (job, attempt) of every training process on this machine."""
    found = set()
    for path in fork_sockets():
        # The forkserver may be exiting, dead or stopped.
        with contextlib.suppress(ForkFailed, OSError, TimeoutError):
            tasks = asyncio.run(asyncio.wait_for(list_tasks(str(path)), FORKSERVER_S))
            found |= {(task["job_id"], task["attempt"]) for task in tasks}
    return found


def of_processes(live: set[tuple[str, int]]) -> Iterator[str]:
    """I2: two attempts of a job don't have processes at the same time."""
    jobs = Counter(job_id for job_id, _ in live)
    for job_id, num_attempts in jobs.items():
        if num_attempts > 1:
            yield f"I2: {num_attempts} attempts of {job_id} have processes at the same time"


def _is_declared(answer: httpx.Response) -> bool:
    kind = answer.headers.get("content-type", "")
    return (
        answer.status_code == 503
        and kind.startswith("application/problem+json")
        and answer.json()["code"] in DECLARED
    )


def of_running_trials(sweep: dict[str, Any]) -> Iterator[str]:
    """I3: no more trials are running than allowed."""
    most, counts = sweep["max_running"], sweep["counts"]
    num_running = sum(counts.get(state, 0) for state in HOLDING)
    if most is not None and num_running > most:
        yield f"I3: {num_running} trials of {sweep['id']} are running, but only {most} may"


def of_books(nodes: list[dict[str, dict[str, float]]]) -> Iterator[str]:
    """I3: nodes don't allocate more than they have."""
    for node in nodes:
        for name, held in node["held"].items():
            if node["alive"] and held > node["resources"].get(name, 0.0):
                yield f"I3: {held} {name} of {node['resources']} are held on {node['node_id']}"
