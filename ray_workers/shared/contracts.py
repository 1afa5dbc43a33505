"""The types that cross the boundary between service and cluster: frozen, plain, picklable.

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
"""The names of series that were guessed from what a script prints begin with this."""


@dataclass(frozen=True)
class Slice:
    """The part of a gang that one node carries."""

    node_id: str
    num_workers: int


@dataclass(frozen=True)
class RoleSlots:
    """Consecutive ranks of a gang with resources of their own. Slices of the gang follow its ranks,
    and no slice has ranks of two roles."""

    role: str
    first_rank: int
    number: int
    bundle: Mapping[str, float]
    """Ray resources of one of them."""


def role_at(rank: int, roles: Sequence[RoleSlots]) -> RoleSlots | None:
    """The role of a rank; None of one without resources of its own."""
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
    """All slices of a gang, each with the bundle of its ranks. bundle: of those without resources
    of their own."""
    if not roles:  # this is asked for very often
        return [(part, bundle) for part in slices]
    found = by_role(slices, roles)
    return [(part, bundle if role is None else role.bundle) for part, role in found]


WORKER_MTBF_S = 24 * 3600.0
"""A worker's mean time between failures, as long as none was seen."""


@dataclass(frozen=True)
class RankSpec:
    """The part of an attempt's spec that each of its ranks gets as well. A field belongs here only
    if every rank may know it: of the silos' sources a rank gets its own alone.

    No field has a default, here and below, so that a hand-over that forgets one is an error.
    """

    job_id: str
    attempt: int
    spec: Mapping[str, Any]
    """The JobSpec, as JSON data."""
    resume_from: tuple[CheckpointRef, ...]
    """Committed checkpoints to resume from, newest first: the first that loads is taken."""
    init_from: CheckpointRef | None
    """Another job's checkpoint to begin with, if there is none to resume from; what is taken of it
    is in `spec`."""
    data_policy: DataPolicy
    environment_policy: EnvironmentPolicy
    spool_limit_bytes: int
    """Most undelivered bytes that one rank keeps for its log, and as many for its metrics."""
    output_limit_bytes: int
    """Most bytes that the files of a script's output folders may have together, and the artifacts
    that one rank saves."""
    worker_mtbf_s: float
    """Mean time between losses of one worker that end an attempt; `checkpoint.every_steps: auto`
    goes by it."""
    furthest_step: int
    """Optimizer steps that an earlier attempt of the job has done: up to there, they are done
    again."""
    array_index: int | None
    """The job's index in its array; None of one that is alone."""
    parameters: Mapping[str, Any]
    """Values of a sweep's trial, by name."""

    @property
    def job_name(self) -> str:
        return str(self.spec["name"])


@dataclass(frozen=True)
class AttemptSpec(RankSpec):
    """All a supervisor needs to run one attempt of a job."""

    deployment_id: str
    traits: GroupTraits
    """The meaning of `spec` for the group."""
    slices: tuple[Slice, ...]
    bundle: Mapping[str, float]
    """Ray resources of one worker: `CPU`, and `GPU` or `memory` where asked for."""
    roles: tuple[RoleSlots, ...]
    """Ranks with other resources."""
    storage_url: str
    code: CodeRef | RemoteCodeRef | None
    """The code that a script brings; None of a recipe, and of a script that nodes have."""
    start_timeout_s: float
    """How long Ray may take to give the slots."""
    max_runtime_s: float | None
    """Running time left to the job, in seconds."""
    min_workers: int | None
    """With how few the group may train on when no replacement is to be had; None: with no fewer
    than it began with."""
    silence_limit_s: float
    """`ray_workers.shared.processes.silence.SilenceLimits.replace_s`."""
    system_metrics_s: float | None
    """Seconds between two samples of system metrics; None: there are none."""
    silo_sources: tuple[str | None, ...]
    """URLs of the data of federated silos, in their order, which `spec` lacks; None for one that
    its node names. Silo n is the worker of slice n + 1, and the first worker is the aggregator.
    Empty of a job without silos."""

    @property
    def world_size(self) -> int:
        return sum(part.num_workers for part in self.slices)

    def bundle_of(self, rank: int) -> Mapping[str, float]:
        """Ray resources of a rank of the first group."""
        role = role_at(rank, self.roles)
        return self.bundle if role is None else role.bundle


class Phase(StrEnum):
    """How far an attempt has come."""

    ACQUIRING = "acquiring"
    """Waiting for Ray to give the slots."""
    STARTING = "starting"
    """Processes are starting; no optimizer step yet."""
    RUNNING = "running"
    """The first optimizer step (or, for a script, the process) was seen."""
    STOPPING = "stopping"
    ENDED = "ended"
    """Every process and slot is seen gone."""


class Cause(StrEnum):
    """Why an attempt ended, which decides the job's next state and whose budget pays."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    """The attempt was asked to stop: the job is being cancelled."""
    USER_ERROR = "user_error"
    """The training code raised, exited non-zero or was killed by a signal of its own."""
    CANNOT_RUN = "cannot_run"
    """The training code has no such file, is not Python or lacks a module: trying again would not
    help."""
    BAD_DATA = "bad_data"
    """The data set is missing or broken: trying again would not help."""
    DIVERGED = "diverged"
    """The loss or the gradient was not finite for too many steps: the same would come again."""
    DATA_UNREACHABLE = "data_unreachable"
    """The source of the data did not answer a worker, however often it asked; later it may."""
    RUNTIME_EXCEEDED = "runtime_exceeded"
    SLOTS_UNAVAILABLE = "slots_unavailable"
    """Ray did not give the slots in time: others use the cluster. Nobody is charged."""
    WORKER_LOST = "worker_lost"
    """A rank actor, its node or its process vanished without an error of its own."""
    INFRASTRUCTURE = "infrastructure"
    """A fault of dray or Ray while starting or running the group."""
    SUPERVISOR_LOST = "supervisor_lost"
    NODE_LOST = "node_lost"
    """The cluster or the node that carried the attempt is gone. Nobody is charged."""
    PREEMPTED = "preempted"
    """The attempt was asked to leave its slots, and saved a checkpoint first. Nobody is charged."""


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    cause: Cause
    message: str
    rank: int | None
    """The rank at fault, where one is."""
    exit_code: int | None
    """Of that rank; negative is the signal that killed it."""
    log_lines_lost: Mapping[int, int | None] | None
    """By rank as its log is named: how many lines of output are in no spool. None where nobody can
    say, because the worker that passed them on vanished; None for the whole if all of them did."""
    slowness: float
    """How many times slower than usual the machines were when its start, its recovery or an answer
    took too long; above 1 only where that is why it ended, and nobody is charged."""
    ran_s: float | None
    """Seconds from the start of its processes to its end, by a clock that stands still while the
    machine sleeps. None where nobody can say, and where it started none."""
    left_behind: str
    """Sentences on results that are not kept, such as those in the working directory; empty if all
    are kept. They are no part of the message, which is compared with that of the next attempt."""

    @classmethod
    def of(
        cls, cause: Cause, message: str, rank: int | None = None, exit_code: int | None = None
    ) -> Outcome:
        """An end at which no output was lost, on machines at their usual pace."""
        return cls(cause, message, rank, exit_code, {}, slowness=1.0, ran_s=None, left_behind="")

    @classmethod
    def unseen(cls, cause: Cause, message: str, slowness: float = 1.0) -> Outcome:
        """The end of an attempt whose supervisor and rank actors are gone, with any output that
        they had not passed on."""
        return cls(cause, message, None, None, None, slowness, ran_s=None, left_behind="")


class FrameKind(StrEnum):
    """The kinds of frames; `ray_workers.shared.frames` has a class for the body of each."""

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
"""Frames of which the first shows that a group trains. A round waits for its clients, perhaps for
hours, before it is a step."""

BATCH_SIZE, NOISE_SCALE = "train/global_batch_size", "train/gradient_noise_scale"
"""Metrics that ranks report and the scheduler goes by."""

COMPUTE_TIME = "perf/compute_time_s"
"""How long a rank computed a share of the batch until it had to do with others."""
SENT_BYTES, ALL_SENT_BYTES = "perf/sent_bytes", "sync/sent_bytes"
"""Sent by a rank in a step; and by all ranks together, on average since the last evaluation."""
STALENESS_MEAN, STALENESS_MAX = "sync/staleness_mean", "sync/staleness_max"
STALENESS_COUNT = "sync/staleness_count/"
"""How the metrics of its histogram begin: so many updates so far were as stale as a bucket says."""
CONSENSUS_DISTANCE = "train/consensus_distance"
"""The root of the mean, over the ranks, of the squared distance of a copy from the mean of all."""

LEFT_EXIT_CODE = 75
"""Exit code of a rank that saved a checkpoint and left when asked (EX_TEMPFAIL of sysexits(3))."""

STORAGE_EXIT_CODE = 74
"""Exit code of a rank that ended by a storage fault, which it may have had no room to report
(EX_IOERR)."""

SUPERVISOR_RANK = -1
"""The rank of the frames that the supervisor itself writes."""


@dataclass(frozen=True)
class Frame:
    """One thing a rank reported. (attempt, rank, incarnation, kind, position) never repeats."""

    rank: int
    incarnation: int
    kind: FrameKind
    time: float
    """Unix seconds by the node's clock."""
    body: Mapping[str, Any]


class ProcessKind(StrEnum):
    """Processes of dray that an attempt can't go on, or come to its end, without."""

    SUPERVISOR = "supervisor"
    NODE_AGENT = "node_agent"
    FORKSERVER = "forkserver"
    RANK_ACTOR = "rank_actor"
    STORE = "store"


@dataclass(frozen=True)
class SilentProcess:
    """A process that lives, as far as Ray knows, and leaves questions unanswered."""

    kind: ProcessKind
    node_id: str | None
    """Where it is; None of a supervisor and a store, of which an attempt has one."""
    since: float
    """Unix seconds of the oldest question that is open."""


@dataclass(frozen=True)
class PollReply:
    """Events after `cursor`, which are to be stored in one transaction with the new cursor."""

    cursor: Mapping[str, int]
    """Bytes read of each spool; opaque to the service, stored as JSON."""
    phase: Phase | None
    """None where nobody could say: the supervisor does not answer."""
    phase_times: Mapping[str, float]
    """Unix seconds at which each phase was entered."""
    frames: tuple[Frame, ...]
    more: bool
    """The byte cap was reached: ask again at once."""
    outcome: Outcome | None
    """Set once the attempt has ended and every frame was delivered; acknowledge it."""
    silent: tuple[SilentProcess, ...]
    """Processes of the attempt that have not answered for a while."""


AWAITING = -1
"""The generation of a process that gets its place in a group once it is ready for one."""
NOT_PREPARED = (
    "elastic is for scripts that call dray.train.prepare(), which shares the batches out "
    "anew: call it, or leave elastic out"
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
    """Directory on this node for temporary files (TMPDIR); deleted when the attempt is over."""
    work_dir: str
    """Directory on this node that a script runs in; the job's own, in all of its attempts."""
    folders_dir: str
    """Directory on this node with the folders whose files dray keeps for a script
    (`ray_workers.node.folders.job_folders`)."""
    page_prefix: str
    """Prefix of the names of the process's page and of the files beside it
    (`ray_workers.shared.heartbeat`). A process without one is not observed, and its group does not
    recover in place."""
    generation: int
    """Generation of the group that the process joins first, as `rank` of `world_size`; if AWAITING,
    `rank` is only the process's name in observations."""
    peers: tuple[str, ...]
    """`host:port` of each rank, by rank, for what a script's framework serves there; empty where
    the framework asks for none."""


@dataclass(frozen=True)
class RankTask(Seat, RankSpec):
    """All a training process needs, handed to it as JSON when it is forked."""

    world_size: int
    num_nodes: int
    """Nodes that the attempt began on."""
    checkpoint_url: str
    """`{storage}/{attempt_prefix}/checkpoints`"""
    artifact_url: str
    """`{storage}/{attempt_prefix}/artifacts`"""
    folder_url: str
    """Copies of the checkpoint folder of a script, by all attempts of the job."""
    device: str
    """`cpu`, or `cuda` with CUDA_VISIBLE_DEVICES naming the one GPU."""
    env: Mapping[str, str]
    silo_source: str | None
    """URL of the data of this rank, where it is a silo."""

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
        """The files of the rounds of a federated job whose clients are outside of the cluster."""
        return f"{self.folder_url.rpartition('/')[0]}/rounds"

    @property
    def series_names_url(self) -> str:
        """The names of the series that were found in files of this rank, by all attempts."""
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
