"""The heartbeat page of a rank: it shows how far the rank is, and announces rendezvous rounds.

One small file per training process, mapped into it, on its own node. The process writes what it
does into it without a system call; whoever watches reads the file. So a process that hangs, is
stopped or dead has still said where it was, without its help. Two words go the other way: which
generation of the group is wanted, and whether the rank is asked to leave.

Times are of the node's monotonic clock, which all its processes share, but for `first_at`.
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

from ray_workers.shared.procfs import DEAD, stat_fields

_WORDS = 24
_HEAD = struct.Struct(f"<{_WORDS}Q")
_RING_AT = 1024
_FIGURES = struct.Struct("<QQQddddd")
RING = 1024
"""Steps of which a rank keeps the figures here: rank 0 tells them, and if it dies with some of
them untold, whoever comes in its place."""
SIZE_BYTES = _RING_AT + RING * _FIGURES.size


class RankPhase(IntEnum):
    """What a rank is at, in the order in which it comes in a step."""

    JOINING = 0
    """Reading data, building the model, forming the group."""
    DATA = 1
    COMPUTE = 2
    """Forward, and backward passes whose gradients are not exchanged."""
    EXCHANGE = 3
    """The backward pass that exchanges gradients."""
    UPDATE = 4
    EVALUATE = 5
    SAVE = 6
    STAND_BY = 7
    """Its group is broken; it waits for a place in the next."""
    FINISH = 8


class TimeCategory(StrEnum):
    """What a second of a slot went into."""

    USEFUL = "useful"
    RECOMPUTED = "recomputed"
    """Steps that had been done before, and were lost."""
    STARTING = "starting"
    DATA_WAIT = "data_wait"
    RECOVERING = "recovering"
    CHECKPOINTING = "checkpointing"
    IDLE = "idle"
    UNREPORTED = "unreported"
    """A script runs on this rank that has not reported a step yet."""


TIME_CATEGORIES = tuple(TimeCategory)


class _Word(IntEnum):
    """Where in the page's head a number lies: 8 bytes each."""

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
    USES = 11  # and the seven behind it


@dataclass(frozen=True)
class RankAssignment:
    """Where a process stands in one generation of its group."""

    generation: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class RankStatus:
    """A page as somebody else sees it."""

    step: int
    """Optimizer steps committed."""
    phase: RankPhase
    collective: int
    """Collectives that were entered, in this generation."""
    since: float
    """Monotonic seconds at which it began what it does, or last got on with it."""
    generation: int
    resumed_step: int
    """After which step this generation began."""
    first_at: float
    """Unix seconds of the first step that this generation committed; 0 before it."""
    pid: int
    use: TimeCategory
    """What goes on now is booked on."""
    uses: Mapping[TimeCategory, float]
    """Seconds, without what goes on now."""


@dataclass(frozen=True)
class RankObservation:
    """What is seen of one training process from its node."""

    rank: int
    incarnation: int
    status: RankStatus
    age_s: float
    """How long it has been at what it does, and not got on."""
    state: str
    """Of its process, as proc(5) has it: `T` is stopped; empty if it is gone."""


class UnreportedStep(NamedTuple):
    """The figures of one step, kept until they lie on the spool."""

    step: int
    epoch: int
    num_samples: int
    lr: float
    loss: float
    grad_norm: float
    step_time_s: float
    data_wait_s: float


class HeartbeatPage:
    """The writer's side: the training process."""

    def __init__(self, path: Path | None) -> None:
        """With no path nobody else can see it."""
        if path is None:
            self._map = mmap.mmap(-1, SIZE_BYTES)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written, not cut to size: a full disk is an error here, and later a SIGBUS. It gets
            # its name whole: others write into what they find, and must not be written over.
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
        self._use = TimeCategory.STARTING
        self._began = time.monotonic()
        self._floats[_Word.SINCE] = self._began

    def enter(self, phase: RankPhase, use: TimeCategory) -> None:
        """Say what begins now; the time since the last call is booked on what ends."""
        now = time.monotonic()
        self._floats[_USE_AT[self._use]] += now - self._began
        self._use, self._began = use, now
        self._ints[_Word.PHASE] = phase
        self._ints[_Word.USE] = _PLACE_OF[use]
        self._floats[_Word.SINCE] = now

    def move(self) -> None:
        """Say that what it does gets on, such as a long evaluation from batch to batch."""
        self._floats[_Word.SINCE] = time.monotonic()

    def exchange(self) -> None:
        """The gradients of a step are about to be exchanged: one more collective is entered."""
        self._ints[_Word.COLLECTIVE] += 1
        self.enter(RankPhase.EXCHANGE, self._use)

    def begin(self, generation: int, step: int) -> None:
        """A generation of the group trains on from after `step`."""
        self._ints[_Word.RESUMED_STEP] = self._ints[_Word.STEP] = step
        self._ints[_Word.COLLECTIVE] = 0
        self._floats[_Word.FIRST_AT] = 0.0
        self._ints[_Word.GENERATION] = generation

    def commit(self, step: int) -> None:
        if not self._ints[_Word.FIRST_AT]:
            self._floats[_Word.FIRST_AT] = time.time()
        self._ints[_Word.STEP] = step

    @property
    def wanted(self) -> int:
        """The newest generation of the group that was announced."""
        return self._ints[_Word.WANTED]

    @property
    def is_asked_to_leave(self) -> bool:
        return self._ints[_Word.LEAVE] != 0

    def keep(self, figures: UnreportedStep) -> None:
        """Hold a step's figures where they outlive this process."""
        at = _RING_AT + figures.step % RING * _FIGURES.size
        _FIGURES.pack_into(self._map, at, *figures)

    def kept(self) -> list[UnreportedStep]:
        """The figures that are held, in order of their steps."""
        return unreported_steps(self._map)


_PLACE_OF = {use: place for place, use in enumerate(TIME_CATEGORIES)}
_USE_AT = {use: _Word.USES + place for place, use in enumerate(TIME_CATEGORIES)}


def page_path(prefix: str) -> Path:
    """Of the process whose files begin with `prefix`."""
    return Path(f"{prefix}.page")


def stack_path(prefix: str) -> Path:
    """Where the process writes its stacks when it gets SIGUSR2."""
    return Path(f"{prefix}.stack")


def _place_path(prefix: str) -> Path:
    return Path(f"{prefix}.place")


def prefix_of(folder: Path, rank: int, incarnation: int) -> str:
    """What the names of a process's files begin with."""
    return str(folder / f"r{rank}.{incarnation}")


def parse_status(data: bytes) -> RankStatus:
    """What a page says."""
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
    )


def observe_ranks(folder: Path) -> list[RankObservation]:
    """Every process of an attempt that left a page in its folder on this node, also the dead."""
    observations = []
    for path in sorted(folder.glob("r*.page")):
        try:
            with path.open("rb") as file:
                data = file.read(_HEAD.size)
        except FileNotFoundError:
            continue
        if len(data) < _HEAD.size:
            continue  # it is just being made
        rank, incarnation = path.stem.removeprefix("r").split(".")
        seen = parse_status(data)
        fields = stat_fields(seen.pid) if seen.pid else []
        state = fields[0].decode() if fields and fields[0] not in DEAD else ""
        age_s = max(0.0, time.monotonic() - seen.since)
        observations.append(RankObservation(int(rank), int(incarnation), seen, age_s, state))
    return observations


def unreported_steps(data: bytes | mmap.mmap) -> list[UnreportedStep]:
    """The figures that a page holds, in order of their steps."""
    found = [
        UnreportedStep(*_FIGURES.unpack_from(data, _RING_AT + place * _FIGURES.size))
        for place in range(RING)
    ]
    return sorted(figures for figures in found if figures.step)


def announce(prefix: str, place: RankAssignment) -> None:
    """Tell a process its place in the next generation of its group."""
    target = _place_path(prefix)
    partial = target.with_suffix(".place.partial")
    partial.write_text(json.dumps(asdict(place)))
    partial.replace(target)
    _poke(prefix, _Word.WANTED, place.generation)


def ask_to_leave(prefix: str) -> None:
    """Have a process end its part between two steps, with a checkpoint."""
    _poke(prefix, _Word.LEAVE, 1)


def announced(prefix: str) -> RankAssignment:
    """The newest place that the process was told."""
    return RankAssignment(**json.loads(_place_path(prefix).read_text()))


def _poke(prefix: str, word: _Word, value: int) -> None:
    """Write one word into another process's page. FileNotFoundError if it has none yet."""
    fd = os.open(page_path(prefix), os.O_WRONLY)
    try:
        os.pwrite(fd, struct.pack("<Q", value), word * 8)
    finally:
        os.close(fd)
