"""Frozen, plain and picklable types that cross the boundary between service and cluster.

The service writes an `AttemptSpec` and reads `PollReply`s. A rank actor passes a `RankTask` to its
training process as JSON. This module needs neither Ray nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

from dray.train.checkpoints import CheckpointRef
from ray_workers.shared.group_traits import GroupTraits
from ray_workers.shared.names import attempt_prefix, folder_url
from ray_workers.shared.node_needs import CodeRef, DataPolicy, EnvironmentPolicy, RemoteCodeRef
from ray_workers.shared.slices import RoleSlots, Slice, role_at

GUESSED: Final = "guessed/"
"""Prefix for the names of metrics that dray recognised in a script's output."""


WORKER_MTBF_S = 24 * 3600.0
"""The mean time between failures that is assumed for a worker until a failure has been observed."""


@dataclass(frozen=True)
class RankSpec:
    """The part of an attempt's spec that each of its ranks also receives. A field belongs here only
    if every rank may know it: a silo's rank, for example, receives only the source of its own silo.

    No field of this class or its subclasses has a default, so omitting one is an error.
    """

    job_id: str
    attempt: int
    spec: Mapping[str, Any]
    """The JobSpec, as JSON data."""
    resume_from: tuple[CheckpointRef, ...]
    """Committed checkpoints, newest first. The attempt resumes from the first that is loadable."""
    init_from: CheckpointRef | None
    """Another job's checkpoint to start from if there is no checkpoint to resume from. `spec`
    specifies which parts of the checkpoint are used."""
    older_than_init_from: tuple[CheckpointRef, ...]
    """Older checkpoints of the other job, newest first. They are never used, but if `init_from` is
    damaged, the error names the first that is intact."""
    data_policy: DataPolicy
    environment_policy: EnvironmentPolicy
    spool_limit_bytes: int
    """Maximum number of undelivered bytes of a rank's log, and separately of its metrics."""
    output_limit_bytes: int
    """Maximum total size in bytes of the files in a script's output folders. The same maximum
    applies separately to the artifacts that one rank saves."""
    worker_mtbf_s: float
    """Mean time in seconds until an attempt ends because it lost a worker. This time determines the
    interval of `checkpoint.every_steps: auto`."""
    furthest_step: int
    """Optimizer steps of earlier attempts. This attempt repeats those after its checkpoint."""
    array_index: int | None
    """The job's index in its array; None if it is not in an array."""
    scheduled_at: str | None
    """The time of the schedule's run, in ISO 8601; None if no schedule submitted the job."""
    parameters: Mapping[str, Any]
    """The parameter values of a sweep's trial, keyed by name."""

    @property
    def job_name(self) -> str:
        return str(self.spec["name"])


@dataclass(frozen=True)
class AttemptSpec(RankSpec):
    """Everything that a supervisor needs to run an attempt of a job."""

    deployment_id: str
    traits: GroupTraits
    """The traits of the group that follow from `spec`."""
    slices: tuple[Slice, ...]
    bundle: Mapping[str, float]
    """Ray resources of one worker: `CPU`, and `GPU` or `memory` if the job requests them."""
    roles: tuple[RoleSlots, ...]
    """Ranks whose resources differ from `bundle`."""
    storage_url: str
    code: CodeRef | RemoteCodeRef | None
    """Code to put on the nodes; None for a recipe, or if the script is already on the nodes."""
    start_timeout_s: float
    """Seconds within which Ray must provide the slots."""
    max_runtime_s: float | None
    """Number of seconds that the job may still run."""
    min_workers: int | None
    """Minimum number of workers with which the group continues if no replacement is available; None
    means the initial number."""
    silence_limit_s: float
    """`ray_workers.shared.processes.silence.SilenceLimits.replace_s`."""
    system_metrics_s: float | None
    """Seconds between samples of system metrics; None disables sampling."""
    silo_sources: tuple[str | None, ...]
    """Data URLs of the federated silos, in silo order; empty if the job has no silos. `spec` does
    not contain these URLs. The entry is None for a silo whose node specifies the data. Silo n is
    the worker of slice n + 1, and the worker of slice 0 is the aggregator."""

    @property
    def num_slots(self) -> int:
        return sum(part.num_workers for part in self.slices)

    @property
    def world_size(self) -> int:
        """Number of ranks with which the attempt starts. The workers in all other slots are
        spares."""
        most = self.traits.most_ranks
        return self.num_slots if most is None else min(self.num_slots, most)

    @property
    def slices_of_ranks(self) -> tuple[Slice, ...]:
        """The slices with which the ranks start. The slices of spares are last, and each has one
        slot."""
        return self.slices[: len(self.slices) - (self.num_slots - self.world_size)]

    def bundle_of(self, rank: int) -> Mapping[str, float]:
        """Return the Ray resources of a rank in the attempt's initial group."""
        role = role_at(rank, self.roles)
        return self.bundle if role is None else role.bundle


class Phase(StrEnum):
    """The phase of an attempt."""

    ACQUIRING = "acquiring"
    """Waiting for Ray to provide the slots."""
    STARTING = "starting"
    """Processes are starting; the group has not completed its first optimizer step."""
    RUNNING = "running"
    """The group has completed an optimizer step or, for a script, the process has started."""
    STOPPING = "stopping"
    ENDED = "ended"
    """All processes have ended and all slots are released."""


SCRIPT_DIFFERS = "the script depends on state that prepare() does not track"
"""Part of the message of an attempt whose ranks ran a script and were not equal after their group
was re-formed."""


class Cause(StrEnum):
    """Why an attempt ended. The cause determines the job's next state and the retry budget that is
    charged."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    """The attempt was asked to stop because the job is being cancelled."""
    USER_ERROR = "user_error"
    """The code raised an exception, exited with a nonzero code, or was killed by a signal."""
    CANNOT_RUN = "cannot_run"
    """A file or module of the code is missing or invalid. Another attempt would not help."""
    BAD_DATA = "bad_data"
    """The data set is missing or invalid. Another attempt would not help."""
    DIVERGED = "diverged"
    """The loss or gradient was not finite for too many steps. Another attempt would not help."""
    DATA_UNREACHABLE = "data_unreachable"
    """The data source did not respond to a worker's repeated requests, but may respond later."""
    RUNTIME_EXCEEDED = "runtime_exceeded"
    SLOTS_UNAVAILABLE = "slots_unavailable"
    """Other programs use the slots, so Ray did not provide them in time. No retry is charged."""
    WORKER_LOST = "worker_lost"
    """A rank actor, its node or its process disappeared without reporting an error."""
    INFRASTRUCTURE = "infrastructure"
    """dray or Ray failed while starting or running the group."""
    CORRUPTED = "corrupted"
    """Replicas of the model that should be equal were different (`check.replicas_every`)."""
    SUPERVISOR_LOST = "supervisor_lost"
    NODE_LOST = "node_lost"
    """The cluster or the node that ran the attempt is gone. No retry is charged."""
    PREEMPTED = "preempted"
    """The attempt saved a checkpoint and released its slots as requested. No retry is charged."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    cause: Cause
    message: str
    rank: int | None
    """The rank at fault, if any."""
    exit_code: int | None
    """Exit code of the rank at fault; negative if a signal killed the rank."""
    log_lines_lost: Mapping[int, int | None] | None
    """Number of output lines lost before they reached a spool, for each rank in the log. A number
    is None if it is unknown because the worker disappeared. The mapping is None if all workers
    disappeared."""
    slowness: float
    """How many times slower than usual the machines were when the start, the recovery or a response
    took too long. The factor is above 1 only if the attempt ended for that reason, in which case no
    retry is charged."""
    ran_s: float | None
    """Seconds from the start of the attempt's processes to its end, on a clock that stops while the
    machine sleeps. None if unknown, or if the attempt started no process."""
    left_behind: str
    """A description of results that are not kept, such as files in the working directory; empty if
    all results are kept. The description is not part of `message`, because `message` is compared
    with the next attempt's message."""

    @classmethod
    def of(
        cls, cause: Cause, message: str, rank: int | None = None, exit_code: int | None = None
    ) -> Outcome:
        """Create an outcome with no lost output and a slowness of 1.0."""
        return cls(cause, message, rank, exit_code, {}, slowness=1.0, ran_s=None, left_behind="")

    @classmethod
    def unseen(cls, cause: Cause, message: str, slowness: float = 1.0) -> Outcome:
        """Create the outcome of an attempt whose supervisor and rank actors are gone. Output that
        the supervisor and the rank actors had not yet forwarded is lost."""
        return cls(cause, message, None, None, None, slowness, ran_s=None, left_behind="")


class FrameKind(StrEnum):
    """The kinds of frames. `ray_workers.shared.frames` has a class for the body of each kind."""

    METRICS = "metrics"
    LOG = "log"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_DROPPED = "checkpoint_dropped"
    ARTIFACT = "artifact"
    RESUMED = "resumed"
    STRAGGLERS = "stragglers"
    DIVERGENCE = "divergence"
    REPLICAS = "replicas"
    MEMORY_COPIES = "memory_copies"
    NO_MEMORY_COPIES = "no_memory_copies"
    SAMPLES = "samples"
    PACKAGES = "packages"
    MEDIA = "media"
    ROUND = "round"
    SILO_ROUND = "silo_round"
    ROUND_TROUBLE = "round_trouble"
    ERROR = "error"

    # Reported by the supervisor, under the rank SUPERVISOR_RANK.
    REGROUPING = "regrouping"
    REGROUPED = "regrouped"
    RESIZED = "resized"
    SPARES = "spares"
    HANG = "hang"
    DRILL = "drill"
    WAITING = "waiting"
    LEDGER = "ledger"
    SYSTEM_METRICS = "system_metrics"


FIRST_SIGNS = frozenset({FrameKind.METRICS, FrameKind.ROUND})
"""Kinds of frames that show that a group is training. ROUND is included because a round may wait
for its clients for hours."""

BATCH_SIZE, NOISE_SCALE = "train/global_batch_size", "train/gradient_noise_scale"
"""Metrics that ranks report and that the scheduler uses."""

TOKENS = "perf/tokens"
"""Number of tokens that a rank computed in a step, including padding."""
COMPUTE_TIME = "perf/compute_time_s"
"""Seconds that a rank spent on its share of the batch before exchanging data with other ranks."""
SENT_BYTES, ALL_SENT_BYTES = "perf/sent_bytes", "sync/sent_bytes"
"""Bytes sent by one rank in a step, and bytes sent by all ranks per step, averaged since the last
evaluation."""
STALENESS_MEAN, STALENESS_MAX = "sync/staleness_mean", "sync/staleness_max"
STALENESS_COUNT = "sync/staleness_count/"
"""Prefix for the metrics of a histogram: the number of updates with a staleness in each bucket."""
CONSENSUS_DISTANCE = "train/consensus_distance"
"""Root mean square, over the ranks, of the distance between a rank's copy and the mean copy."""

MAX_PACKAGES = 2000
"""Maximum number of packages that a rank reports."""

LEFT_EXIT_CODE = 75
"""Exit code of a rank that saved a checkpoint and left as requested (EX_TEMPFAIL)."""

STORAGE_EXIT_CODE = 74
"""Exit code of a rank that failed because of a storage fault, even if it could not report the fault
(EX_IOERR)."""

SUPERVISOR_RANK = -1
"""The `rank` of frames that the supervisor writes."""


@dataclass(frozen=True)
class Frame:
    """A report of a rank. (attempt, rank, incarnation, kind, position) is unique."""

    rank: int
    incarnation: int
    kind: FrameKind
    time: float
    """Unix time in seconds, by the node's clock."""
    body: Mapping[str, Any]


class ProcessKind(StrEnum):
    """dray's own processes, without which an attempt can neither continue nor end."""

    SUPERVISOR = "supervisor"
    NODE_AGENT = "node_agent"
    FORKSERVER = "forkserver"
    RANK_ACTOR = "rank_actor"
    STORE = "store"


@dataclass(frozen=True)
class SilentProcess:
    """A process that is alive according to Ray, but does not respond to requests."""

    kind: ProcessKind
    node_id: str | None
    """None for a supervisor or a store, since an attempt has only one of each."""
    since: float
    """Unix time in seconds of the oldest request without a response."""


@dataclass(frozen=True)
class PollReply:
    """Events since the previous cursor, to be stored in the same transaction as the new cursor."""

    cursor: Mapping[str, int]
    """Number of bytes read from each spool. The service stores the cursor as opaque JSON."""
    phase: Phase | None
    """None if unknown, because the supervisor does not respond."""
    phase_times: Mapping[str, float]
    """Unix time in seconds at which each phase was entered."""
    frames: tuple[Frame, ...]
    more: bool
    """Whether the byte limit was reached, so that the caller should poll again immediately."""
    outcome: Outcome | None
    """Set once the attempt has ended and every frame is delivered. It must be acknowledged."""
    silent: tuple[SilentProcess, ...]
    """Processes of the attempt that have not responded for a while."""


AWAITING = -1
"""The generation of a process that is not assigned to a group until it is ready to join one."""
NOT_PREPARED = (
    "elastic requires a script that calls dray.train.prepare(), through which ranks join the "
    "group: call it, or remove elastic"
)


@dataclass(frozen=True)
class ProcessSpec:
    """The fields of a `RankTask` that differ between the processes of an attempt."""

    rank: int
    incarnation: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    spool_dir: str
    """Directory on this node to which frames are appended (`dray.train`)."""
    temp_dir: str
    """Directory on this node for temporary files (TMPDIR); deleted after the attempt."""
    work_dir: str
    """Directory on this node in which a script runs, shared by all attempts of the job."""
    folders_dir: str
    """Directory on this node that contains the script's output folder, and the local copy of its
    checkpoint folder if there is one (`ray_workers.node.folders.job_folders`)."""
    page_prefix: str
    """Path prefix of the process's heartbeat page and of the files next to it
    (`ray_workers.shared.heartbeat`). A process without a heartbeat page is not monitored, and its
    group does not recover in place."""
    generation: int
    """Generation of the first group that the process joins, as rank `rank` of `world_size`. If this
    is AWAITING, `rank` only identifies the process in observations."""
    peers: tuple[str, ...]
    """`host:port` of each rank, in rank order; empty if the framework needs no ports."""


@dataclass(frozen=True)
class RankTask(ProcessSpec, RankSpec):
    """Everything that a training process needs. The process receives the task as JSON when it is
    forked."""

    world_size: int
    num_nodes: int
    """Number of nodes on which the attempt started."""
    checkpoint_url: str
    """`{storage}/{attempt_prefix}/checkpoints`"""
    artifact_url: str
    """`{storage}/{attempt_prefix}/artifacts`"""
    folder_url: str
    """URL for copies of a script's checkpoint folder, shared by all attempts of the job."""
    device: str
    """`cpu`, or `cuda` if CUDA_VISIBLE_DEVICES contains the rank's only GPU."""
    env: Mapping[str, str]
    silo_source: str | None
    """URL of this rank's data, if the rank is a silo."""

    @classmethod
    def of(cls, attempt: AttemptSpec, process: ProcessSpec) -> RankTask:
        """Return the task of `process` in `attempt`."""
        base = (
            f"{attempt.storage_url.rstrip('/')}/{attempt_prefix(attempt.job_id, attempt.attempt)}"
        )
        is_silo = attempt.silo_sources and process.rank
        return cls(
            **{field.name: getattr(attempt, field.name) for field in fields(RankSpec)},
            **vars(process),
            world_size=attempt.world_size,
            num_nodes=len({part.node_id for part in attempt.slices_of_ranks}),
            checkpoint_url=f"{base}/checkpoints",
            artifact_url=f"{base}/artifacts",
            folder_url=folder_url(attempt.storage_url, attempt.job_id),
            device="cuda" if attempt.bundle_of(process.rank).get("GPU") else "cpu",
            env={},
            silo_source=attempt.silo_sources[process.rank - 1] if is_silo else None,
        )

    @property
    def rounds_url(self) -> str:
        """URL of the rounds' files, if clients are outside of the cluster."""
        return f"{self.folder_url.rpartition('/')[0]}/rounds"

    @property
    def series_names_url(self) -> str:
        """URL of the list of metrics that attempts of this job have found in this rank's files."""
        return f"{self.folder_url.rpartition('/')[0]}/series-names/rank-{self.rank:05d}.json"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankTask:
        data = json.loads(text)
        data["resume_from"] = tuple(CheckpointRef(**ref) for ref in data["resume_from"])
        data["init_from"] = data["init_from"] and CheckpointRef(**data["init_from"])
        older = data["older_than_init_from"]
        data["older_than_init_from"] = tuple(CheckpointRef(**ref) for ref in older)
        data["data_policy"] = DataPolicy.from_dict(data["data_policy"])
        data["environment_policy"] = EnvironmentPolicy(**data["environment_policy"])
        data["peers"] = tuple(data["peers"])
        return cls(**data)
