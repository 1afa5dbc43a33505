"""What the API answers, as the server writes it and the clients read it.

Times are RFC 3339 in UTC. A metric value that JSON cannot hold (NaN, infinities) is served as
the string `"NaN"`, `"Infinity"` or `"-Infinity"`. Clients ignore fields they do not know, so
that a newer server stays readable.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from dray.drills import DrillKind as DrillKind
from dray.drills import DrillState as DrillState


class JobState(StrEnum):
    """Where a job is. The last three absorb: nothing leads out of them."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_terminal(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


MetricValue = float | Literal["NaN", "Infinity", "-Infinity"]


class View(BaseModel):
    """Base of every answer."""

    # Each class is built when it is first used, not when the command line starts.
    model_config = ConfigDict(extra="ignore", defer_build=True)


class Reason(View):
    """Why something is as it is: a code for programs, a sentence for people."""

    code: str
    message: str


class Progress(View):
    step: int
    total_steps: int | None = None
    epoch: int | None = None
    samples_per_s: float | None = None
    """Null while the job is not RUNNING, as `eta_s`."""
    eta_s: float | None = None


class Links(View):
    self: str
    metrics: str
    logs: str
    events: str
    artifacts: str
    ray_dashboard: str | None = None


class SlotSeconds(View):
    """What slots were used for, in slot-seconds: each second of each slot is in one class."""

    useful: float
    recomputed: float
    """Steps that had been done before, and were lost."""
    starting: float
    data_wait: float
    recovering: float
    checkpointing: float
    idle: float
    """Held to no use that anyone saw."""
    unreported: float = 0.0
    """By a script that reported no step, so that nobody knows of what use it was."""


class Goodput(View):
    """How well a job used what it held, over all its attempts."""

    slot_seconds: SlotSeconds
    total: float
    """The sum of the classes: all that was held."""
    useful_share: float | None = None
    """Of the total, 0 to 1; unset while nothing was held, and while a script has reported no
    step."""


class Job(View):
    id: str
    name: str
    owner: str
    project: str
    labels: dict[str, str]
    state: JobState
    reason: Reason
    queue: str
    priority: int
    spec: dict[str, Any]
    attempt: int
    """Number of the newest attempt; 0 before the first."""
    world_size: int
    """Workers that it has, or last had; while it waits, those that it asks for."""
    position: int | None = None
    """Place in the queue, 1 being next, as of the scheduler's last look; only while it waits."""
    progress: Progress | None = None
    summary: dict[str, MetricValue]
    """The last value of each metric of rank 0."""
    warnings: list[Reason] = []
    """What went wrong without ending the job, such as a loss that was not finite."""
    recoveries: int = 0
    """How often its group lost a rank and was recovered in place."""
    goodput: Goodput | None = None
    """Unset until an attempt has told what its slots were used for."""
    created_at: datetime
    started_at: datetime | None = None
    """When the first attempt was launched."""
    first_step_at: datetime | None = None
    """When the first optimizer step of the job was reported, by the worker's clock; unset for a
    script that reports none."""
    finished_at: datetime | None = None
    links: Links


class JobPage(View):
    items: list[Job]
    next_cursor: str | None = None


class Series(View):
    steps: list[int]
    values: list[MetricValue]


class Metrics(View):
    series: dict[str, Series]
    next_step: int
    """Ask again with `after_step=next_step` for what comes later. While the job is live its newest
    step comes again, because more of it may be on the way: merge by step."""


class Point(View):
    """One value of one series."""

    key: str
    step: int
    value: MetricValue


class LogLine(View):
    attempt: int
    rank: int
    time: datetime
    text: str


class LogPage(View):
    items: list[LogLine]
    next_cursor: str
    """Ask again with it, also when `items` was empty: it never ends while the job runs."""
    complete: bool
    """True when the job is over and this page reaches the end of its log."""


class Event(View):
    seq: int
    """1, 2, 3 ... within the job, without gaps."""
    time: datetime
    type: str
    from_state: JobState | None = None
    to_state: JobState | None = None
    attempt: int
    code: str
    message: str
    actor: str | None = None
    """Whose token caused it, `anonymous` without tokens; unset of what happened by itself."""
    data: dict[str, Any] = {}


class EventPage(View):
    items: list[Event]
    next_seq: int


class Reset(View):
    """Data of the event `reset`, after which a stream begins anew with the first event."""

    code: str
    message: str
    newest_seq: int


class PassedOver(View):
    """A checkpoint that was not resumed from, because it is damaged."""

    step: int
    why: str


class Position(View):
    epoch: int
    """Epochs that were completed."""
    step_in_epoch: int
    samples: int
    """Of the epoch's order that are used up, the same at any world size."""


class Receipt(View):
    """What an attempt went on from."""

    step: int
    """0 if it began afresh."""
    url: str
    """Of the checkpoint; empty if none was sound."""
    sha256: str | None = None
    """Of the manifest, which was checked, and with it every file."""
    size_bytes: int | None = None
    position: Position | None = None
    """Where the data go on."""
    world_size: int | None = None
    """Of the group that saved."""
    optimizer_restored: bool = False
    rng: str | None = None
    """Where random numbers go on from."""
    loss_before: MetricValue | None = None
    """Training loss of the step that was saved; null if it was no number."""
    loss_after: MetricValue | None = None
    """Training loss of the first step after it."""
    passed_over: list[PassedOver] = []


class Attempt(View):
    attempt: int
    state: str
    world_size: int
    resume_step: int
    """Optimizer steps already done when it began; 0 for a fresh start."""
    receipt: Receipt | None = None
    """Unset for a fresh start."""
    reason: Reason | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None


class AttemptPage(View):
    items: list[Attempt]


class Checkpoint(View):
    attempt: int
    step: int
    size_bytes: int
    sha256: str
    """Hash of the manifest, which holds the hash of each file."""
    created_at: datetime
    is_latest: bool
    is_best: bool
    metric: MetricValue | None = None
    url: str


class CheckpointPage(View):
    items: list[Checkpoint]


class CheckpointFile(View):
    path: str
    """Relative to the checkpoint."""
    size_bytes: int
    sha256: str


class CheckpointFilePage(View):
    items: list[CheckpointFile]
    """The manifest comes last: it was written last, and holds the hash of each of the others."""


class Artifact(View):
    id: str
    path: str
    size_bytes: int
    sha256: str
    created_at: datetime


class ArtifactPage(View):
    items: list[Artifact]


class HangRank(View):
    """Where one rank was."""

    rank: int
    step: int | None = None
    phase: str | None = None
    collective: int | str | None = None
    """The last collective that it entered."""
    since_s: float | None = None
    """How long it had been there."""
    stack: str | None = None


class Hang(View):
    """Who stood still, and where everyone was."""

    seq: int
    """1, 2, 3 ... within the job; only the newest are kept."""
    attempt: int
    time: datetime
    culprits: list[int]
    """Ranks that kept the others waiting."""
    step: int | None = None
    phase: str | None = None
    """What the culprits were doing, such as `data_wait` or `forward`."""
    waited_s: float | None = None
    limit_s: float | None = None
    """How long the job's own step time lets a rank stand still."""
    ranks: list[HangRank]


class HangPage(View):
    items: list[Hang]


class Drill(View):
    """A fault that was asked for, and how the job took it."""

    id: str
    kind: DrillKind
    rank: int
    at_step: int | None = None
    """Optimizer steps done when it was to strike; unset: at once."""
    attempt: int
    state: DrillState
    step: int | None = None
    """Optimizer steps done when it struck."""
    recovery_s: float | None = None
    """From the strike until the job trained on."""
    steps_lost: int | None = None
    message: str
    created_at: datetime
    finished_at: datetime | None = None


class DrillPage(View):
    items: list[Drill]


class OtherJob(View):
    """A job that another one waits for."""

    id: str
    name: str
    state: JobState
    priority: int
    world_size: int
    """Workers that it has, or asks for."""


class Explanation(View):
    """Why a job is where it is."""

    state: JobState
    reason: Reason
    position: int | None = None
    """Place in the queue, 1 being next; only while it waits."""
    queue_length: int | None = None
    """Jobs that wait, this one among them; only while it waits."""
    blocked_by: list[str] = []
    """Ids of the jobs that hold what it waits for."""
    ahead: list[OtherJob] = []
    """Jobs that wait before it, the next to start first: the first 20."""
    running: list[OtherJob] = []
    """Jobs that hold slots, those in `blocked_by` first: the first 20."""
    expected_start_at: datetime | None = None
    """When the jobs in its way reach their `max_runtime_s`, if they have one."""


class QuarantinedSlots(View):
    """Slots that no job is given, because something of the job that had them is not gone."""

    slots: int
    reason: str
    since: datetime
    job_id: str


class NodeSlots(View):
    node_id: str
    hostname: str
    alive: bool
    resources: dict[str, float]
    held: dict[str, float]
    """What live attempts of dray hold there."""
    accepted: bool
    reason: str | None = None
    """Why the node is refused, when it is."""
    quarantined: list[QuarantinedSlots] = []
    """They are tried again every few seconds, and given back when they are clean."""
    jobs: list[str]


class PlannedMemory(View):
    """Bytes of the rank that holds the most, at the fullest moment of a step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """All else: what the backward pass needs, gathered weights, buffers. Where the fullest moment
    is before all gradients are there, less by those."""
    total_bytes: int


class PlannedMesh(View):
    """One way to divide a job."""

    name: str
    parallel: dict[str, Any]
    """As in a job document."""
    micro_batch_size: int
    num_micro_batches: int
    memory: PlannedMemory
    missing_bytes: int | None = None
    """0 if it fits; null where nobody knows how much memory there is."""
    step_time_s: float
    """Expected: the sum of the three below."""
    compute_s: float
    send_s: float
    idle_s: float
    """Of a pipeline."""
    why: str


class Calibration(View):
    """What the times are computed with."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str
    """Where the numbers come from."""


class Plan(View):
    """How a job could be divided among its workers."""

    chosen: str | None = None
    """Name of the mesh that `parallel: auto` would become; null if none fits."""
    meshes: list[PlannedMesh]
    """Those that fit, the fastest first; then those that don't, by how much they lack."""
    memory_bytes_per_rank: int | None = None
    """What must hold it; null where nobody knows."""
    memory_source: str
    change: str | None = None
    """Where none fits, the smallest change of the document that makes one fit."""
    calibration: Calibration
    assumed: list[str] = []
    """What only the data could tell, and was taken to be the usual."""


class StorageState(View):
    """How full the storage is, as it was last looked at."""

    used_bytes: int | None = None
    """Of checkpoints, artifacts and logs; only where there is a quota."""
    quota_bytes: int | None = None
    free_bytes: int | None = None
    """Of the disk under it; only where some must stay free."""
    min_free_bytes: int | None = None
    problem: str | None = None
    """Why no job is taken or started; unset while there is room."""


class Cluster(View):
    connected: bool
    reason: str | None = None
    ray_address: str | None = None
    ray_dashboard: str | None = None
    nodes: list[NodeSlots]
    storage: StorageState = StorageState()
    updated_at: datetime | None = None


class Problem(View):
    """RFC 9457 problem+json, with a stable code and where to look."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    pointer: str | None = None
    """JSON pointer to the field at fault, such as `/resources/num_workers`."""
    hint: str | None = None
    instance: str | None = None
    request_id: str | None = None
    """Of the answer's `X-Request-Id`; the server's log has it too."""
