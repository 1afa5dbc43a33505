"""The heartbeat page of a rank, which shows the rank's progress and announces rendezvous rounds.

A page is a small file for each training process, on the process's node and mapped into its memory.
The process writes its progress to this memory without a system call, and other processes read the
file. Therefore other processes can see how far a process got, even if it hangs, is stopped or is
dead. Two words of a page are written by other processes: the generation of the group that the
process must join next, and whether the rank is asked to leave.

All times except `first_at` are from the node's monotonic clock, which all processes of the node
share.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import NamedTuple

from ray_workers.shared.processes.procfs import DEAD, stat_fields

_WORDS = 24
_HEAD = struct.Struct(f"<{_WORDS}Q")
_RING_AT = 1024
_FIGURES = struct.Struct("<QQQddddd")
RING = 1024
"""Number of steps whose figures a rank keeps in its page. Rank 0 reports the figures. If rank 0
dies before it has reported all figures, its replacement reports the rest."""
SIZE_BYTES = _RING_AT + RING * _FIGURES.size


class RankPhase(IntEnum):
    """The current activity of a rank. Phases that belong to a step are numbered in the order in
    which they occur in the step."""

    JOINING = 0
    """Reading data, building the model, forming the group."""
    DATA = 1
    COMPUTE = 2
    """Forward passes, and backward passes that do not exchange gradients."""
    EXCHANGE = 3
    """The backward pass that exchanges gradients."""
    UPDATE = 4
    EVALUATE = 5
    SAVE = 6
    STANDBY = 7
    """The rank waits for an assignment to the next group, because its group is broken, or because
    it is new or a spare."""
    FINISH = 8
    FORMING = 9
    """All ranks have met and are connecting to each other. If there is no rendezvous, this phase is
    part of `JOINING`."""


class TimeCategory(StrEnum):
    """How a second of a slot was used."""

    USEFUL = "useful"
    """Time for optimizer steps that are not repetitions of lost steps."""
    RECOMPUTED = "recomputed"
    """Time spent repeating lost steps."""
    STARTING = "starting"
    """The time from the grant of the slot to the first step."""
    DATA_WAIT = "data_wait"
    RECOVERING = "recovering"
    """Time from the loss of a rank until the group resumed training."""
    CHECKPOINTING = "checkpointing"
    IDLE = "idle"
    """Held but not used: the attempt is stopping, or the use is unknown."""
    UNREPORTED = "unreported"
    """Time used by a script that has not reported a step yet; might be useful."""
    SPARE = "spare"
    """Time for which a spare was ready to take the place of another rank."""


TIME_CATEGORIES = tuple(TimeCategory)


class _Word(IntEnum):
    """Indices of the 8-byte numbers at the head of a page."""

    STEP = 0
    PHASE = 1
    COLLECTIVE = 2
    SINCE = 3
    GENERATION = 4
    RESUMED_STEP = 5
    FIRST_AT = 6
    WANTED = 7
    LEAVE = 8
    PID = 9
    USE = 10
    USES = 11  # and the next eight
    PREPARED = 20
    UNVERIFIED = 21
    THREAD = 22


@dataclass(frozen=True)
class RankAssignment:
    """The rank of a process in one generation of its group."""

    generation: int
    rank: int
    world_size: int
    batch_size: int | None
    """Global batch size, starting with this generation; None keeps the batch size of the training
    state."""


@dataclass(frozen=True)
class RankStatus:
    """The contents of a page, as other processes read it."""

    step: int
    """Number of committed optimizer steps."""
    phase: RankPhase
    collective: int
    """Number of collectives that the rank has entered in this generation."""
    since: float
    """Monotonic time, in seconds, at which the phase began or last made progress."""
    generation: int
    resumed_step: int
    """The step after which this generation began."""
    first_at: float
    """Unix time in seconds of the first step that this generation committed; 0 before that."""
    pid: int
    use: TimeCategory
    """The category to which the time in the current phase will be added."""
    uses: Mapping[TimeCategory, float]
    """Seconds by category, not including the current phase."""
    is_prepared: bool
    """Whether the process runs a script that has called `train.prepare`, and therefore follows its
    group into the next round."""
    is_verified: bool = True
    """Whether the ranks of this generation are known to have equal copies of the state, or don't
    need equal copies."""
    thread: int = 0
    """Native id of the thread that trains, if it is not the main thread; otherwise 0."""

    @property
    def training_thread(self) -> int:
        """Native id of the thread that trains. The id of the main thread is the process's id."""
        return self.thread or self.pid


@dataclass(frozen=True)
class RankObservation:
    """An observation of a training process by its node."""

    rank: int
    """In the response of a node, the index of the worker. `GroupMonitor` replaces the index with
    the worker's current rank."""
    incarnation: int
    status: RankStatus
    age_s: float
    """Seconds since the phase began or last made progress."""
    state: str
    """State of the process as in proc(5), such as `T` for stopped; empty if the process no longer
    exists."""


@dataclass(frozen=True)
class NodeObservation:
    """An observation of an attempt by a node's agent."""

    ranks: tuple[RankObservation, ...]
    slowness: float | None
    """How many times slower than usual the node is; None if not requested."""
    system_metrics: Mapping[int, Mapping[str, float]]
    """Metric values by rank and name. The values of one rank include the metrics of the node. Empty
    if not requested."""


class UnreportedStep(NamedTuple):
    """The figures of a step, which are kept until they are in the spool."""

    step: int
    epoch: int
    num_samples: int
    lr: float
    loss: float
    grad_norm: float
    step_time_s: float
    data_wait_s: float


class HeartbeatPage:
    """The page of this training process, to which it writes its progress."""

    def __init__(self, path: Path | None, *, goes_on: bool = False) -> None:
        """Create a page, which other processes can read if it has a path. With `goes_on`, open the
        page that this process created before it executed another program; other processes may
        already have written to it."""
        if path is None:
            self._map = mmap.mmap(-1, SIZE_BYTES)
        elif goes_on:
            with open(path, "r+b") as file:
                self._map = mmap.mmap(file.fileno(), SIZE_BYTES)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Write zeros instead of truncating the file to its size, so that a full disk raises an
            # error here instead of causing a SIGBUS later. Give the file its name only after
            # writing the zeros, because other processes write to a page as soon as it exists.
            unnamed = path.with_suffix(".page.partial")
            with open(unnamed, "w+b") as file:
                file.write(bytes(SIZE_BYTES))
                file.flush()
                self._map = mmap.mmap(file.fileno(), SIZE_BYTES)
            path.hardlink_to(unnamed)
            unnamed.unlink()
        self._ints = memoryview(self._map)[: _WORDS * 8].cast("Q")
        self._floats = memoryview(self._map)[: _WORDS * 8].cast("d")
        self._ints[_Word.PID] = os.getpid()
        self._ints[_Word.THREAD] = 0
        self._use = TimeCategory.STARTING
        self._began = time.monotonic()
        self._floats[_Word.SINCE] = self._began

    def enter(self, phase: RankPhase, use: TimeCategory) -> None:
        """Begin a phase, and add the time since the last call to the category of the previous
        phase."""
        now = time.monotonic()
        self._floats[_USE_AT[self._use]] += now - self._began
        self._use, self._began = use, now
        self._ints[_Word.PHASE] = phase
        self._ints[_Word.USE] = _INDEX_OF[use]
        self._floats[_Word.SINCE] = now

    def move(self) -> None:
        """Record progress within a phase, such as from batch to batch in a long evaluation."""
        self._floats[_Word.SINCE] = time.monotonic()

    def exchange(self) -> None:
        """Enter the next collective, which exchanges the gradients of a step."""
        self._ints[_Word.COLLECTIVE] += 1
        self.enter(RankPhase.EXCHANGE, self._use)

    def compute(self) -> None:
        """Enter the phase COMPUTE again, for strategies that exchange data before the backward
        pass."""
        self.enter(RankPhase.COMPUTE, self._use)

    def begin(self, generation: int, step: int, *, is_verified: bool = True) -> None:
        """Begin a generation of the group that continues training after `step`. If `is_verified` is
        False, the ranks still have to compare their copies of the state and then call `verify`."""
        self._ints[_Word.RESUMED_STEP] = self._ints[_Word.STEP] = step
        self._ints[_Word.COLLECTIVE] = 0
        self._floats[_Word.FIRST_AT] = 0.0
        self._ints[_Word.UNVERIFIED] = not is_verified
        self._ints[_Word.GENERATION] = generation

    def verify(self) -> None:
        """Record that the ranks have equal copies of the state."""
        self._ints[_Word.UNVERIFIED] = 0

    def commit(self, step: int) -> None:
        if not self._ints[_Word.FIRST_AT]:
            self._floats[_Word.FIRST_AT] = time.time()
        self._ints[_Word.STEP] = step

    @property
    def has_stepped(self) -> bool:
        """Whether a step has been committed in this generation."""
        return self._floats[_Word.FIRST_AT] != 0.0

    def show_prepared(self) -> None:
        """Record that this script's process follows its group into the next round."""
        self._ints[_Word.PREPARED] = 1

    def trains_in(self, thread: int) -> None:
        """Record that the thread with this native id trains from now on."""
        self._ints[_Word.THREAD] = thread

    @property
    def wanted(self) -> int:
        """The latest announced generation of the group."""
        return self._ints[_Word.WANTED]

    @property
    def must_leave_group(self) -> bool:
        """Whether a generation of the group has been announced after the generation that began
        last."""
        return self.wanted > self._ints[_Word.GENERATION]

    @property
    def is_asked_to_leave(self) -> bool:
        return self._ints[_Word.LEAVE] != 0

    def keep(self, figures: UnreportedStep) -> None:
        """Store a step's figures in the page, which remains after this process has ended."""
        at = _RING_AT + figures.step % RING * _FIGURES.size
        _FIGURES.pack_into(self._map, at, *figures)

    def kept(self) -> list[UnreportedStep]:
        """Return the stored figures, sorted by step."""
        return unreported_steps(self._map)


_INDEX_OF = {use: index for index, use in enumerate(TIME_CATEGORIES)}
_USE_AT = {use: _Word.USES + index for index, use in enumerate(TIME_CATEGORIES)}


def page_path(prefix: str) -> Path:
    """Return the path of the page of the process whose files begin with `prefix`."""
    return Path(f"{prefix}.page")


def stack_path(prefix: str) -> Path:
    """Return the path of the file to which the process appends its stacks on SIGUSR2."""
    return Path(f"{prefix}.stack")


def _assignment_path(prefix: str) -> Path:
    return Path(f"{prefix}.place")


def prefix_of(folder: Path, worker_index: int, incarnation: int) -> str:
    """Return the path prefix of a process's files."""
    return str(folder / f"r{worker_index}.{incarnation}")


def parse_status(data: bytes) -> RankStatus:
    """Return the status in a page."""
    ints = _HEAD.unpack_from(data)
    floats = struct.unpack_from(f"<{_WORDS}d", data)
    return RankStatus(
        step=ints[_Word.STEP],
        phase=RankPhase(ints[_Word.PHASE]),
        collective=ints[_Word.COLLECTIVE],
        since=floats[_Word.SINCE],
        generation=ints[_Word.GENERATION],
        resumed_step=ints[_Word.RESUMED_STEP],
        first_at=floats[_Word.FIRST_AT],
        pid=ints[_Word.PID],
        use=TIME_CATEGORIES[ints[_Word.USE]],
        uses={use: floats[at] for use, at in _USE_AT.items()},
        is_prepared=ints[_Word.PREPARED] != 0,
        is_verified=ints[_Word.UNVERIFIED] == 0,
        thread=ints[_Word.THREAD],
    )


def read_status(path: Path) -> RankStatus | None:
    """Return the status in a page on this node; None if the page is missing, incomplete or
    damaged."""
    try:
        with path.open("rb") as file:
            return parse_status(file.read(_HEAD.size))
    except (OSError, struct.error, ValueError, IndexError):
        return None


def observe_ranks(folder: Path) -> list[RankObservation]:
    """Return an observation of every process that has a page in the folder, including dead
    processes."""
    observations = []
    for path in sorted(folder.glob("r*.page")):
        seen = read_status(path)
        if seen is None:
            continue
        worker_index, incarnation = path.stem.removeprefix("r").split(".")
        fields = stat_fields(seen.pid) if seen.pid else []
        state = fields[0].decode() if fields and fields[0] not in DEAD else ""
        age_s = max(0.0, time.monotonic() - seen.since)
        observations.append(
            RankObservation(int(worker_index), int(incarnation), seen, age_s, state)
        )
    return observations


def unreported_steps(data: bytes | mmap.mmap) -> list[UnreportedStep]:
    """Return the figures in a page, sorted by step."""
    found = [
        UnreportedStep(*_FIGURES.unpack_from(data, _RING_AT + index * _FIGURES.size))
        for index in range(RING)
    ]
    return sorted(figures for figures in found if figures.step)


def figures_of_earlier_processes(prefix: str) -> list[UnreportedStep]:
    """Return the figures that were stored by earlier processes on this node with the same rank as
    this process."""
    own = Path(prefix)
    pages = own.parent.glob(f"{own.name.split('.')[0]}.*.page")
    return [figures for page in pages for figures in unreported_steps(page.read_bytes())]


def announce(prefix: str, assignment: RankAssignment) -> None:
    """Assign a process to a rank in the next generation of its group."""
    target = _assignment_path(prefix)
    partial = target.with_suffix(".place.partial")
    partial.write_text(json.dumps(asdict(assignment)))
    partial.replace(target)
    _poke(prefix, _Word.WANTED, assignment.generation)


def ask_to_leave(prefix: str) -> None:
    """Ask a process to save a checkpoint and exit between two steps."""
    _poke(prefix, _Word.LEAVE, 1)


def announced(prefix: str) -> RankAssignment:
    """Return the latest assignment that was announced to the process."""
    return RankAssignment(**json.loads(_assignment_path(prefix).read_text()))


def _poke(prefix: str, word: _Word, value: int) -> None:
    """Write one word to another process's page. Raises FileNotFoundError if the process has no page
    yet."""
    fd = os.open(page_path(prefix), os.O_WRONLY)
    try:
        os.pwrite(fd, struct.pack("<Q", value), word * 8)
    finally:
        os.close(fd)
