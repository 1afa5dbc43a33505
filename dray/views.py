"""The answers of the API, which server and clients share.

Times are RFC 3339 in UTC. A metric value that JSON cannot hold (NaN, infinities) is served as
the string `"NaN"`, `"Infinity"` or `"-Infinity"`. Clients ignore fields they do not know, so
that a newer server stays readable.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from dray.drills import DrillKind as DrillKind
from dray.drills import DrillState as DrillState


class JobState(StrEnum):
    """State of a job. The last three are final."""

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

    # Each class is built at its first use, not when the command line starts.
    model_config = ConfigDict(extra="ignore", defer_build=True)


class Reason(View):
    """A reason, as a code for programs and a sentence for people."""

    code: str
    message: str


class Progress(View):
    step: int
    total_steps: int | None = None
    epoch: int | None = None
    samples_per_s: float | None = None
    """Null while the job is not RUNNING, like `eta_s`."""
    eta_s: float | None = None


class Links(View):
    self: str
    metrics: str
    logs: str
    events: str
    artifacts: str
    ray_dashboard: str | None = None


class SlotSeconds(View):
    """Use of slots in slot-seconds; each second of each slot is in one class."""

    useful: float
    recomputed: float
    """Repeated steps, whose first results were lost."""
    starting: float
    data_wait: float
    recovering: float
    checkpointing: float
    idle: float
    """Time without a known use."""
    unreported: float = 0.0
    """Time of a script that reported no step, so that its use is unknown."""


class Goodput(View):
    """How well a job used its slots, over all its attempts."""

    slot_seconds: SlotSeconds
    total: float
    """The sum of the classes, which is all time for which slots were held."""
    useful_share: float | None = None
    """Share of the total, 0 to 1; unset while nothing was held, and while a script has reported no
    step."""


class Cost(View):
    """The price of slots, divided as the goodput divides their time; the parts add up to the
    total."""

    currency: str
    total: float
    useful: float
    wasted: float
    unreported: float
    """Of time whose use nobody can say, such as that of a script that has reported no step."""


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
    held_by: str | None = None
    """Name of the caller who holds the waiting job, so that it does not start."""
    spec: dict[str, Any]
    array_id: str | None = None
    """Id of the array that the job belongs to; unset, like `array_index`, of one that is alone."""
    array_index: int | None = None
    """Index of the job in its array, from 0."""
    attempt: int
    """Number of the newest attempt; 0 before the first."""
    world_size: int
    """Number of workers that the job has or last had; while it waits, the number it asks for."""
    position: int | None = None
    """Place in the queue, from 1, as of the scheduler's last run; only while the job waits."""
    progress: Progress | None = None
    summary: dict[str, MetricValue]
    """The last value of each metric of rank 0."""
    warnings: list[Reason] = []
    """Problems that did not end the job, such as a loss that was not finite."""
    recoveries: int = 0
    """Number of times that the group lost a rank and was recovered in place."""
    goodput: Goodput | None = None
    """Unset until an attempt has reported the use of its slots."""
    cost: Cost | None = None
    """Sum over all attempts, up to their newest reports; unset where slots have no prices."""
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


class JobArray(View):
    """The jobs that one document with `array` made."""

    id: str
    name: str
    owner: str
    project: str
    queue: str
    size: int
    """Number of jobs that were made; those that were deleted since are in no count."""
    max_running: int | None = None
    counts: dict[JobState, int]
    """Number of jobs in each state that a job of the array is in."""
    is_sweep: bool = False
    """Whether its jobs are the trials of a sweep."""
    stopped_early: int = 0
    """Of those that are CANCELLED, the trials that were stopped because others are better."""
    created_at: datetime

    @property
    def state(self) -> str:
        """The number of its jobs in each state, as a sentence: `4 RUNNING, 96 QUEUED`."""
        return ", ".join(f"{n} {state}" for state in JobState if (n := self.counts.get(state)))

    @property
    def has_bad_ends(self) -> bool:
        """Whether a job failed or was cancelled, other than a trial that was stopped early."""
        bad = self.counts.get(JobState.FAILED, 0) + self.counts.get(JobState.CANCELLED, 0)
        return bad > self.stopped_early

    def is_settled(self, states: Collection[JobState] = ()) -> bool:
        """Whether each job is over, or in one of these states."""
        return all(state.is_terminal or state in states for state in self.counts)


class Trial(View):
    """A job of a sweep."""

    index: int
    job_id: str
    state: JobState
    reason: Reason
    parameters: dict[str, Any] | None = None
    """Values by name; null until the sampler has been asked for them."""
    value: float | None = None
    """Value by which the trial is compared; null while no finite number was reported."""
    step: int | None = None
    """Step at which the value was reported."""
    last_step: int | None = None
    """Highest step at which the metric was reported."""
    is_best: bool = False
    """Whether no trial that has neither failed nor been stopped early has a better value."""


class TrialPage(View):
    items: list[Trial]
    next_cursor: str | None = None


class JobSweep(JobArray):
    """The trials of a sweep, as an array, and the best of them."""

    metric: str
    mode: Literal["min", "max"]
    """Whether a lower or a higher value is better."""
    by: Literal["best", "last"]
    """The value of a trial: the best that it has reported, or the last."""
    sampler: str
    sweep: dict[str, Any]
    """The part `sweep` of the document."""
    best: Trial | None = None
    """The best trial so far; null while no trial has a value."""


class Series(View):
    steps: list[int]
    values: list[MetricValue]


class Metrics(View):
    series: dict[str, Series]
    next_step: int
    """Pass as `after_step` to get later points. While the job is live its newest step is sent
    again, because more values of it may follow: merge by step."""


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
    """Pass as `cursor` to get later lines, also when `items` is empty."""
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
    """Name of the caller's token, `anonymous` without tokens; unset for events without a caller."""
    data: dict[str, Any] = {}


class EventPage(View):
    items: list[Event]
    next_seq: int


class Reset(View):
    """Data of the event `reset`, after which a stream starts again with the first event."""

    code: str
    message: str
    newest_seq: int


class PassedOver(View):
    """A damaged checkpoint that was skipped."""

    step: int
    why: str


class Position(View):
    epoch: int
    """Number of completed epochs."""
    step_in_epoch: int
    samples: int
    """Samples of the epoch that are used up, in an order that is the same at any world size."""


class Receipt(View):
    """The state that an attempt resumed from."""

    step: int
    """Step of the checkpoint; 0 for a fresh start."""
    url: str
    """URL of the checkpoint; empty if none was intact."""
    sha256: str | None = None
    """Hash of the manifest, by which every file was verified."""
    size_bytes: int | None = None
    position: Position | None = None
    """Position in the data."""
    world_size: int | None = None
    """World size of the group that saved the checkpoint."""
    optimizer_restored: bool = False
    rng: str | None = None
    """How random numbers continue."""
    loss_before: MetricValue | None = None
    """Training loss of the saved step; null if it was no number."""
    loss_after: MetricValue | None = None
    """Training loss of the first step after the saved one."""
    passed_over: list[PassedOver] = []


class Attempt(View):
    attempt: int
    state: str
    world_size: int
    resume_step: int
    """Optimizer steps done before the attempt; 0 for a fresh start."""
    receipt: Receipt | None = None
    """Unset for a fresh start."""
    reason: Reason | None = None
    cost: Cost | None = None
    """Up to its newest report; unset where slots have no prices."""
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
    """Path relative to the checkpoint."""
    size_bytes: int
    sha256: str


class CheckpointFilePage(View):
    items: list[CheckpointFile]
    """Files of the checkpoint; the last is the manifest, which has the hashes of the others."""


class Artifact(View):
    id: str
    path: str
    size_bytes: int
    sha256: str
    created_at: datetime


class ArtifactPage(View):
    items: list[Artifact]


class Code(View):
    """Uploaded code, or what of an upload is still to be sent."""

    id: str
    """`code-` and a hash of all its files: the same files have the same id."""
    num_files: int
    size_bytes: int
    is_complete: bool
    """Whether every part is there, so that a job may name it."""
    missing: list[str] = []
    """The SHA-256 of each part that is still to be sent."""


class CodeFile(View):
    path: str
    size_bytes: int
    is_executable: bool


class CodeFilePage(View):
    id: str
    items: list[CodeFile]


class HangRank(View):
    """Position of one rank."""

    rank: int
    step: int | None = None
    phase: str | None = None
    collective: int | str | None = None
    """The last collective that the rank entered."""
    since_s: float | None = None
    """Seconds that the rank had spent in its phase."""
    stack: str | None = None


class Hang(View):
    """A hang, with the position of every rank."""

    seq: int
    """1, 2, 3 ... within the job; only the newest are kept."""
    attempt: int
    time: datetime
    culprits: list[int]
    """Ranks that kept the others waiting."""
    step: int | None = None
    phase: str | None = None
    """Phase of the culprits, such as `data_wait` or `forward`."""
    waited_s: float | None = None
    limit_s: float | None = None
    """Seconds that a rank may stand still, derived from the job's step time."""
    ranks: list[HangRank]


class HangPage(View):
    items: list[Hang]


class Drill(View):
    """A fault injected on request, and the recovery of the job."""

    id: str
    kind: DrillKind
    rank: int
    at_step: int | None = None
    """Optimizer steps after which the fault is injected; unset: at once."""
    attempt: int
    state: DrillState
    step: int | None = None
    """Optimizer steps done when the fault was injected."""
    recovery_s: float | None = None
    """Seconds from the injection until the job trained again."""
    steps_lost: int | None = None
    message: str
    created_at: datetime
    finished_at: datetime | None = None


class DrillPage(View):
    items: list[Drill]


class QueueUser(View):
    """Jobs of one user in a queue."""

    owner: str
    weight: float
    """The user's share of what the queue uses, beside those of the others."""
    num_waiting: int
    num_held: int
    """Of those that wait, the jobs that are held."""
    num_running: int
    """Jobs that hold slots."""
    holds: dict[str, float]
    """Resources that they hold now, in Ray's names."""


class Queue(View):
    """A queue: its rules, and the jobs in it."""

    name: str
    weight: float
    user_weights: dict[str, float]
    """Weights of users; that of all others is 1."""
    quota: dict[str, float]
    limit: dict[str, float]
    user_limit: dict[str, float]
    max_running: int | None = None
    max_running_per_user: int | None = None
    max_queued: int | None = None
    max_queued_per_user: int | None = None
    max_priority: int
    budget: float | None = None
    """The most that its jobs may cost in all; once that is spent, no more of them start."""
    monthly_budget: float | None = None
    spent: float | None = None
    """The cost of its jobs in all, up to their newest reports; unset where slots have no
    prices, like the next two."""
    spent_this_month: float | None = None
    currency: str | None = None
    num_waiting: int
    num_held: int
    num_running: int
    holds: dict[str, float]
    users: list[QueueUser]
    """By name, those who have jobs here that have not ended."""
    warnings: list[Reason] = []
    """Rules that the cluster can't honour, such as a quota above what it has."""


class QueuePage(View):
    items: list[Queue]


class Price(View):
    """The price of an hour of a resource, on the nodes that have all of these labels."""

    resource: str
    """`CPU`, `GPU`, `memory` by the GiB, or `slot` for each worker."""
    per_hour: float
    currency: str
    labels: dict[str, str] = {}


class CostItem(View):
    """The cost of one user, or of the jobs of one queue, in one currency."""

    name: str
    cost: Cost
    slot_hours: float
    num_jobs: int
    """Jobs that held slots in this time, also such as were deleted since."""


class CostReport(View):
    """The costs of users or queues in a span of time, the dearest first."""

    by: str
    """`user` or `queue`."""
    since: datetime
    until: datetime
    items: list[CostItem]
    prices: list[Price] = []
    """As they are now. Of each resource the first that is for a node's labels holds there."""
    warnings: list[Reason] = []


class OtherJob(View):
    """A job that another one waits for."""

    id: str
    name: str
    state: JobState
    priority: int
    world_size: int
    """Number of workers that the job has, or asks for."""


class Forecast(View):
    """When something is expected."""

    at: datetime | None = None
    """Null where nobody can tell; `reason` then says why."""
    not_before: datetime | None = None
    """Where `at` is null: until when it will not have come."""
    reason: Reason | None = None
    num_assumed: int = 0
    """Jobs of which nobody knows how long they take, and that were assumed to take as long as
    others of late, to make this forecast."""
    made_at: datetime
    first_at: datetime | None = None
    """The first time that was told; its error is measured."""


class ForecastError(View):
    """How far off the first forecasts were."""

    count: int
    """Forecasts whose event has come, of the last 7 days."""
    median_s: float | None = None
    """Median of the absolute error."""
    p90_s: float | None = None
    """In nine of ten cases the error was no larger."""
    median_ahead_s: float | None = None
    """How long before its event the median forecast was made."""


class ForecastErrors(View):
    starts: ForecastError
    ends: ForecastError


class Counterfactual(View):
    """A change of a waiting job, and when the job would start with it."""

    message: str
    """`starts now with 4 workers`, `never: the largest node has 8 GPU`."""
    at: datetime | None = None
    """When it would start; null if never, or nobody knows when."""
    num_workers: int | None = None
    queue: str | None = None
    priority: int | None = None
    """The thing that is changed; all three are null of a job that could never start as it is, and
    where `required_topology` is left out."""


class Explanation(View):
    """Why a job is in its state."""

    state: JobState
    reason: Reason
    position: int | None = None
    """Place in the order in which the scheduler looks at jobs, from 1; only while the job waits."""
    queue_length: int | None = None
    """Number of waiting jobs, including this one; only while it waits."""
    blocked_by: list[str] = []
    """Ids of the jobs that hold the slots that this job waits for, or of the jobs and arrays after
    whose end it starts."""
    ahead: list[OtherJob] = []
    """The first 20 jobs ahead in the queue, the next to start first."""
    running: list[OtherJob] = []
    """The first 20 jobs that hold slots, those in `blocked_by` first."""
    favoured: list[Reason] = []
    """Rules by which jobs of others come before this one while it waits: quotas of other queues,
    and use beyond the share of its queue or user."""
    expected_start_at: datetime | None = None
    """`start.at`."""
    start: Forecast | None = None
    """Only while the job waits, and from the first forecast on."""
    end: Forecast | None = None
    """Only while the job has slots."""
    counterfactuals: list[Counterfactual] = []
    """Changes that would have a waiting job start, or start earlier."""
    forecast_error: ForecastError | None = None
    """Of earlier forecasts of starts, or of ends while the job has slots."""


class Decision(View):
    """A round of the scheduler that changed something."""

    number: int
    made_at: datetime
    started: list[str] = []
    """Ids of jobs, here and below the first 20."""
    grew: list[str] = []
    shrank: list[str] = []
    """Groups that were asked to give slots back."""
    left: list[str] = []
    """Running jobs that were asked to leave their slots."""
    failed: list[str] = []
    """Jobs that the cluster could not run, were it empty."""
    num_changes: int
    num_waiting: int
    num_running: int


class DecisionPage(View):
    items: list[Decision]
    """The newest first."""
    next_before: int | None = None
    """Ask with it as `before` for older ones; null if there are none."""


class DecisionOnJob(View):
    """The decision about one job, and the facts that it went by."""

    job_id: str
    decision: str
    """`start`, `wait`, `preempt`, `grow`, `shrink`, `stay` or `impossible`."""
    reason: Reason | None = None
    num_workers: int | None = None
    node_ids: list[str] = []
    because_of: str | None = None
    """The job for which it was to leave, or to give slots back."""
    queue: str | None = None
    owner: str | None = None
    priority: int | None = None
    left_s: float | None = None
    """Seconds that it had left, by its progress and earlier runs; null where nothing told."""
    waited_s: float | None = None


class ReplayedDecision(Decision):
    """A round, and what the policy decides now of what it saw then."""

    nodes: dict[str, dict[str, float]]
    """The resources that jobs could take of each node."""
    is_same: bool
    """Whether the policy decides now as it did then."""
    decided: list[DecisionOnJob]
    """In the order in which the jobs were considered. Of the jobs that waited, those are kept that
    the decisions depended on."""
    replayed: list[DecisionOnJob]


class QuarantinedSlots(View):
    """Slots that are withheld, because parts of their last job are not gone yet."""

    slots: int
    reason: str
    since: datetime
    job_id: str


class NodeSlots(View):
    node_id: str
    hostname: str
    alive: bool
    resources: dict[str, float]
    labels: dict[str, str] = {}
    """Ray's labels of the node, by which its slots may be priced."""
    held: dict[str, float]
    """Resources that live attempts of dray hold on the node."""
    accepted: bool
    reason: str | None = None
    """Why the node is refused, or, of an accepted node, why its disk takes no files."""
    quarantined: list[QuarantinedSlots] = []
    """Slots in quarantine, which are checked every few seconds and returned when clean."""
    jobs: list[str]


class PlannedMemory(View):
    """Bytes on the rank with the most, at the peak of a step."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    """All other memory: activations for the backward pass, gathered weights, buffers; less the
    gradients that do not exist yet at the peak."""
    total_bytes: int


class PlannedMesh(View):
    """One way to divide a job."""

    name: str
    parallel: dict[str, Any]
    """The field `parallel` of a job document."""
    micro_batch_size: int
    num_micro_batches: int
    memory: PlannedMemory
    missing_bytes: int | None = None
    """Bytes missing on a worker, 0 if the mesh fits; null if the workers' memory is unknown."""
    step_time_s: float
    """Expected step time, which is the sum of the next three fields."""
    compute_s: float
    send_s: float
    idle_s: float
    """Idle time of a pipeline."""
    why: str


class Calibration(View):
    """Speeds from which the times are computed."""

    flops_per_s: float
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str
    """Origin of the numbers."""


class Plan(View):
    """How a job could be divided among its workers."""

    chosen: str | None = None
    """Name of the mesh that `parallel: auto` would choose; null if none fits."""
    meshes: list[PlannedMesh]
    """Meshes that fit, the fastest first; then the others, by the memory that is missing."""
    memory_bytes_per_rank: int | None = None
    """Memory of each worker; null if unknown."""
    memory_source: str
    change: str | None = None
    """If no mesh fits, the smallest change of the document that makes one fit."""
    calibration: Calibration
    assumed: list[str] = []
    """Properties of the data that are not in the document and were assumed."""


class StorageState(View):
    """Use of the storage, as last measured."""

    used_bytes: int | None = None
    """Bytes of checkpoints, artifacts and logs; only with a quota."""
    quota_bytes: int | None = None
    free_bytes: int | None = None
    """Free bytes of the storage's disk; only with `DRAY_MIN_FREE_BYTES`."""
    min_free_bytes: int | None = None
    problem: str | None = None
    """Why no job is accepted or started; unset while there is room."""


class AutoscalingState(View):
    """The request to Ray's autoscaler. Whether one runs is not known before nodes come."""

    max_nodes: int
    """The most nodes of the types that may be added, with those of them that are there."""
    num_nodes: int = 0
    """Number of nodes that are to come."""
    asked_at: datetime | None = None
    """Since when nodes are to come."""


class Cluster(View):
    connected: bool
    reason: str | None = None
    ray_address: str | None = None
    ray_dashboard: str | None = None
    nodes: list[NodeSlots]
    storage: StorageState = StorageState()
    autoscaling: AutoscalingState | None = None
    """None where no nodes may be added."""
    updated_at: datetime | None = None


class Problem(View):
    """RFC 9457 problem+json with a stable code."""

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
    """Id of the request in the answer's `X-Request-Id` and in the server's log."""
