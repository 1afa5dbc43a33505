"""The types that cross the boundary between service and cluster: frozen, plain and picklable.

The service writes an `AttemptSpec` and reads `PollReply`s; a rank actor hands its training
process a `RankTask` as JSON. Nothing here needs ray or torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

from dray.train.checkpoints import CheckpointRef
from ray_workers.shared.group_traits import GroupTraits
from ray_workers.shared.names import attempt_prefix, folder_url
from ray_workers.shared.node_needs import CodeRef, DataPolicy, EnvironmentPolicy, RemoteCodeRef

GUESSED: Final = "guessed/"
"""Prefix of the names of series that were guessed from the output of a script."""


@dataclass(frozen=True)
class Slice:
    """The part of a gang on one node."""

    node_id: str
    num_workers: int


@dataclass(frozen=True)
class RoleSlots:
    """Consecutive ranks of a gang with resources of their own. Slices of a gang are in the order of
    its ranks, and no slice has ranks of two roles."""

    role: str
    first_rank: int
    number: int
    bundle: Mapping[str, float]
    """Ray resources of one rank."""


def role_at(rank: int, roles: Sequence[RoleSlots]) -> RoleSlots | None:
    """The role of a rank; None if the rank has no resources of its own."""
    of_rank = (role for role in roles if 0 <= rank - role.first_rank < role.number)
    return next(of_rank, None)


def by_role(
    slices: Sequence[Slice], roles: Sequence[RoleSlots]
) -> list[tuple[Slice, RoleSlots | None]]:
    """All slices of a gang, each with the role of its ranks (`role_at`)."""
    found, rank = [], 0
    for part in slices:
        found.append((part, role_at(rank, roles)))
        rank += part.num_workers
    return found


def by_bundle(
    slices: Sequence[Slice], bundle: Mapping[str, float], roles: Sequence[RoleSlots]
) -> list[tuple[Slice, Mapping[str, float]]]:
    """All slices of a gang, each with the bundle of its ranks. bundle: for ranks without resources
    of their own."""
    if not roles:  # this function is called very often
        return [(part, bundle) for part in slices]
    found = by_role(slices, roles)
    return [(part, bundle if role is None else role.bundle) for part, role in found]


WORKER_MTBF_S = 24 * 3600.0
"""A worker's mean time between failures, until a failure was seen."""


@dataclass(frozen=True)
class RankSpec:
    """The part of an attempt's spec that each of its ranks gets too. A field belongs here only if
    every rank may know it: a rank of a silo, for example, gets the source of its own silo alone.

    No field has a default, here and below, so that omitting one is an error.
    """

    job_id: str
    attempt: int
    spec: Mapping[str, Any]
    """The JobSpec, as JSON data."""
    resume_from: tuple[CheckpointRef, ...]
    """Committed checkpoints to resume from, newest first: the first that loads is taken."""
    init_from: CheckpointRef | None
    """Another job's checkpoint to begin with if there is none to resume from. `spec` states which
    parts of it are used."""
    data_policy: DataPolicy
    environment_policy: EnvironmentPolicy
    spool_limit_bytes: int
    """Most undelivered bytes of a rank's log; the same limit applies to its metrics."""
    output_limit_bytes: int
    """Most bytes of all files in a script's output folders, and most bytes of all artifacts that
    one rank saves."""
    worker_mtbf_s: float
    """Mean time between losses of one worker that end an attempt, which determines the interval of
    `checkpoint.every_steps: auto`."""
    furthest_step: int
    """Optimizer steps that an earlier attempt of the job has done; the attempt repeats those after
    its checkpoint."""
    array_index: int | None
    """The job's index in its array; None if the job is in no array."""
    parameters: Mapping[str, Any]
    """Values of a sweep's trial, by name."""

    @property
    def job_name(self) -> str:
        return str(self.spec["name"])


@dataclass(frozen=True)
class AttemptSpec(RankSpec):
    """Everything that a supervisor needs to run one attempt of a job."""

    deployment_id: str
    traits: GroupTraits
    """The meaning of `spec` for the group."""
    slices: tuple[Slice, ...]
    bundle: Mapping[str, float]
    """Ray resources of one worker: `CPU`, and `GPU` or `memory` if the job asks for them."""
    roles: tuple[RoleSlots, ...]
    """Ranks whose resources differ from `bundle`."""
    storage_url: str
    code: CodeRef | RemoteCodeRef | None
    """Code to put on the nodes; None for a recipe, and for a script that the nodes have already."""
    start_timeout_s: float
    """Seconds within which Ray has to provide the slots."""
    max_runtime_s: float | None
    """Seconds that the job may still run."""
    min_workers: int | None
    """The fewest workers with which the group may train on if no replacement is available; None
    requires as many as at the start."""
    silence_limit_s: float
    """`ray_workers.shared.processes.silence.SilenceLimits.replace_s`."""
    system_metrics_s: float | None
    """Seconds between two samples of system metrics; None takes no samples."""
    silo_sources: tuple[str | None, ...]
    """URLs of the data of federated silos, in their order; `spec` does not contain them. None for a
    silo whose node names its data. Silo n is the worker of slice n + 1, and the first worker is the
    aggregator. Empty if the job has no silos."""

    @property
    def world_size(self) -> int:
        return sum(part.num_workers for part in self.slices)

    def bundle_of(self, rank: int) -> Mapping[str, float]:
        """Ray resources of a rank of the group that the attempt begins with."""
        role = role_at(rank, self.roles)
        return self.bundle if role is None else role.bundle


class Phase(StrEnum):
    """The phase of an attempt."""

    ACQUIRING = "acquiring"
    """Waiting for Ray to provide the slots."""
    STARTING = "starting"
    """Processes are starting; no optimizer step yet."""
    RUNNING = "running"
    """The group did its first optimizer step; or, for a script, the process started."""
    STOPPING = "stopping"
    ENDED = "ended"
    """All processes are gone and all slots are released."""


class Cause(StrEnum):
    """Why an attempt ended, which decides the job's next state and whose budget pays."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    """The attempt was asked to stop because the job is being cancelled."""
    USER_ERROR = "user_error"
    """The training code raised, exited non-zero or was killed by a signal of its own."""
    CANNOT_RUN = "cannot_run"
    """The code lacks a file or module, or is not Python; another attempt would not help."""
    BAD_DATA = "bad_data"
    """The data set is missing or broken; another attempt would not help."""
    DIVERGED = "diverged"
    """The loss or gradient was not finite for too many steps; another attempt would not help."""
    DATA_UNREACHABLE = "data_unreachable"
    """The source of the data did not answer a worker after repeated requests; it may later."""
    RUNTIME_EXCEEDED = "runtime_exceeded"
    SLOTS_UNAVAILABLE = "slots_unavailable"
    """Ray did not provide the slots in time, because others use the cluster. No one is charged."""
    WORKER_LOST = "worker_lost"
    """A rank actor, its node or its process vanished without an error of its own."""
    INFRASTRUCTURE = "infrastructure"
    """A fault of dray or Ray while starting or running the group."""
    SUPERVISOR_LOST = "supervisor_lost"
    NODE_LOST = "node_lost"
    """The cluster or the node that carried the attempt is gone. No one is charged."""
    PREEMPTED = "preempted"
    """The attempt was asked to leave its slots, and saved a checkpoint first. No one is charged."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    cause: Cause
    message: str
    rank: int | None
    """The rank at fault, if one is."""
    exit_code: int | None
    """Exit code of that rank; negative if a signal killed it."""
    log_lines_lost: Mapping[int, int | None] | None
    """The number of output lines that are in no spool, by rank as the log names it. The number is
    None if unknown, because the worker that passed the lines on vanished; the mapping is None if
    all workers vanished."""
    slowness: float
    """How many times slower than usual the machines were when the start, the recovery or an answer
    took too long. Above 1 only if the attempt ended for that reason, and then no one is charged."""
    ran_s: float | None
    """Seconds from the start of the attempt's processes to its end, by a clock that stands still
    while the machine sleeps. None if unknown, or if the attempt started no process."""
    left_behind: str
    """Sentences on results that are not kept, such as files in the working directory; empty if all
    are kept. They are not in `message`, which is compared with that of the next attempt."""

    @classmethod
    def of(
        cls, cause: Cause, message: str, rank: int | None = None, exit_code: int | None = None
    ) -> Outcome:
        """An end at which no output was lost, on machines at their usual speed."""
        return cls(cause, message, rank, exit_code, {}, slowness=1.0, ran_s=None, left_behind="")

    @classmethod
    def unseen(cls, cause: Cause, message: str, slowness: float = 1.0) -> Outcome:
        """The end of an attempt whose supervisor and rank actors are gone. Output that they had not
        passed on is lost."""
        return cls(cause, message, None, None, None, slowness, ran_s=None, left_behind="")


class FrameKind(StrEnum):
    """The kinds of frames. `ray_workers.shared.frames` has a class for the body of each."""

    METRICS = "metrics"
    LOG = "log"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_DROPPED = "checkpoint_dropped"
    ARTIFACT = "artifact"
    RESUMED = "resumed"
    STRAGGLERS = "stragglers"
    DIVERGENCE = "divergence"
    ROUND = "round"
    SILO_ROUND = "silo_round"
    ROUND_TROUBLE = "round_trouble"
    ERROR = "error"

    # Reported by the supervisor, as the rank SUPERVISOR_RANK.
    REGROUPING = "regrouping"
    REGROUPED = "regrouped"
    RESIZED = "resized"
    HANG = "hang"
    DRILL = "drill"
    WAITING = "waiting"
    LEDGER = "ledger"
    SYSTEM_METRICS = "system_metrics"


FIRST_SIGNS = frozenset({FrameKind.METRICS, FrameKind.ROUND})
"""The first frame of one of these kinds shows that a group trains. A round waits for its clients,
perhaps for hours, before it is a step."""

BATCH_SIZE, NOISE_SCALE = "train/global_batch_size", "train/gradient_noise_scale"
"""Metrics that ranks report and the scheduler uses."""

COMPUTE_TIME = "perf/compute_time_s"
"""Seconds that a rank computed its share of the batch before it exchanged data with others."""
SENT_BYTES, ALL_SENT_BYTES = "perf/sent_bytes", "sync/sent_bytes"
"""Bytes that a rank sent in a step; all ranks together, on average since the last evaluation."""
STALENESS_MEAN, STALENESS_MAX = "sync/staleness_mean", "sync/staleness_max"
STALENESS_COUNT = "sync/staleness_count/"
"""Prefix of the metrics of a histogram: how many updates so far had the staleness of a bucket."""
CONSENSUS_DISTANCE = "train/consensus_distance"
"""Root mean square, over the ranks, of the distance between a rank's copy and the mean copy."""

LEFT_EXIT_CODE = 75
"""Exit code of a rank that saved a checkpoint and left when asked (EX_TEMPFAIL of sysexits(3))."""

STORAGE_EXIT_CODE = 74
"""Exit code of a rank that ended by a storage fault, for whose report there may have been no space
(EX_IOERR)."""

SUPERVISOR_RANK = -1
"""The rank of the frames that the supervisor itself writes."""


@dataclass(frozen=True)
class Frame:
    """A report of a rank. (attempt, rank, incarnation, kind, position) never repeats."""

    rank: int
    incarnation: int
    kind: FrameKind
    time: float
    """Unix seconds by the node's clock."""
    body: Mapping[str, Any]


class ProcessKind(StrEnum):
    """Processes of dray without which an attempt can't go on or end."""

    SUPERVISOR = "supervisor"
    NODE_AGENT = "node_agent"
    FORKSERVER = "forkserver"
    RANK_ACTOR = "rank_actor"
    STORE = "store"


@dataclass(frozen=True)
class SilentProcess:
    """A process that is alive, as far as Ray knows, but leaves questions unanswered."""

    kind: ProcessKind
    node_id: str | None
    """The node of the process; None for a supervisor or a store, of which an attempt has one."""
    since: float
    """Unix seconds of the oldest unanswered question."""


@dataclass(frozen=True)
class PollReply:
    """Events after `cursor`. They are to be stored in one transaction with the new cursor."""

    cursor: Mapping[str, int]
    """Bytes read from each spool. Opaque to the service, which stores it as JSON."""
    phase: Phase | None
    """None if unknown, because the supervisor does not answer."""
    phase_times: Mapping[str, float]
    """Unix seconds at which each phase was entered."""
    frames: tuple[Frame, ...]
    more: bool
    """Whether the limit of bytes was reached; poll again at once."""
    outcome: Outcome | None
    """Set once the attempt has ended and every frame was delivered. It must be acknowledged."""
    silent: tuple[SilentProcess, ...]
    """Processes of the attempt that have not answered for a while."""


AWAITING = -1
"""The generation of a process that is assigned to a group once it is ready to join one."""
NOT_PREPARED = (
    "elastic requires a script that calls dray.train.prepare(), which redistributes the "
    "batches: call it, or leave elastic out"
)


@dataclass(frozen=True)
class Seat:
    """The fields of a `RankTask` that differ between the processes of one attempt."""

    rank: int
    incarnation: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    spool_dir: str
    """Directory on this node into which frames are appended (`dray.train`)."""
    temp_dir: str
    """Directory on this node for temporary files (TMPDIR); deleted after the attempt."""
    work_dir: str
    """Directory on this node in which a script runs. All attempts of the job share it."""
    folders_dir: str
    """Directory on this node with the folders whose files dray keeps for a script
    (`ray_workers.node.folders.job_folders`)."""
    page_prefix: str
    """Prefix of the names of the process's heartbeat page and of the files next to it
    (`ray_workers.shared.heartbeat`). A process without a page is not observed, and its group does
    not recover in place."""
    generation: int
    """Generation of the group that the process joins first, as `rank` of `world_size`. If AWAITING,
    `rank` only names the process in observations."""
    peers: tuple[str, ...]
    """`host:port` at which each rank serves its framework, by rank; empty if it needs none."""


@dataclass(frozen=True)
class RankTask(Seat, RankSpec):
    """Everything that a training process needs. It gets the task as JSON when it is forked."""

    world_size: int
    num_nodes: int
    """Number of nodes on which the attempt began."""
    checkpoint_url: str
    """`{storage}/{attempt_prefix}/checkpoints`"""
    artifact_url: str
    """`{storage}/{attempt_prefix}/artifacts`"""
    folder_url: str
    """Copies of a script's checkpoint folder, shared by all attempts of the job."""
    device: str
    """`cpu`, or `cuda` with CUDA_VISIBLE_DEVICES naming the one GPU."""
    env: Mapping[str, str]
    silo_source: str | None
    """URL of the data of this rank, if the rank is a silo."""

    @classmethod
    def of(cls, attempt: AttemptSpec, seat: Seat) -> RankTask:
        """The task of the process that takes this seat in the attempt."""
        base = (
            f"{attempt.storage_url.rstrip('/')}/{attempt_prefix(attempt.job_id, attempt.attempt)}"
        )
        is_silo = attempt.silo_sources and seat.rank
        return cls(
            **{field.name: getattr(attempt, field.name) for field in fields(RankSpec)},
            **vars(seat),
            world_size=attempt.world_size,
            num_nodes=len({part.node_id for part in attempt.slices}),
            checkpoint_url=f"{base}/checkpoints",
            artifact_url=f"{base}/artifacts",
            folder_url=folder_url(attempt.storage_url, attempt.job_id),
            device="cuda" if attempt.bundle_of(seat.rank).get("GPU") else "cpu",
            env={},
            silo_source=attempt.silo_sources[seat.rank - 1] if is_silo else None,
        )

    @property
    def rounds_url(self) -> str:
        """URL of the files of rounds, if clients are outside of the cluster."""
        return f"{self.folder_url.rpartition('/')[0]}/rounds"

    @property
    def series_names_url(self) -> str:
        """URL of the names of the series that were found in files of this rank by any attempt."""
        return f"{self.folder_url.rpartition('/')[0]}/series-names/rank-{self.rank:05d}.json"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankTask:
        data = json.loads(text)
        data["resume_from"] = tuple(CheckpointRef(**ref) for ref in data["resume_from"])
        data["init_from"] = data["init_from"] and CheckpointRef(**data["init_from"])
        data["data_policy"] = DataPolicy.from_dict(data["data_policy"])
        data["environment_policy"] = EnvironmentPolicy(**data["environment_policy"])
        data["peers"] = tuple(data["peers"])
        return cls(**data)
