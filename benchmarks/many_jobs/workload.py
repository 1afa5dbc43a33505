"""The reports of jobs: groups of eight ranks with one step per second, like a recipe's reports."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from functools import lru_cache

from ray_workers.shared.contracts import SUPERVISOR_RANK, Frame, FrameKind
from ray_workers.shared.spool_reader import spool_key
from service.domain.series import CHUNK_POINTS

NUM_RANKS = 8
PERIOD_S = 1.0
"""Seconds between two steps of a job."""
NUM_PHASES = 50
"""Number of different offsets within a second at which jobs take their steps."""
LINE_EVERY, LEDGER_EVERY = 10, 10
"""Steps between two log lines of a rank, and between two ledgers of a supervisor."""
TOTAL_STEPS = 1_000_000
EVERY_RANK = ("perf/step_time_s", "perf/data_wait_s")
RANK_0 = (*EVERY_RANK, "train/loss", "train/lr", "train/grad_norm", "perf/samples_per_s")
LINE = "step {step} of rank {rank}: loss {loss:.6f}, everything is as it should be here"


def first_step(phase: int) -> int:
    """Return the first step of a phase. It differs by phase, so that metric chunks are filled to
    different degrees."""
    return (phase + 1) * CHUNK_POINTS // (NUM_PHASES + 1)


def offset_s(phase: int) -> float:
    """Return the offset within a second at which the jobs of a phase take their steps."""
    return phase * PERIOD_S / NUM_PHASES


def names_of(rank: int) -> tuple[str, ...]:
    return RANK_0 if rank == 0 else EVERY_RANK


def value_of(rank: int, index: int, step: int) -> float:
    return 1.0 + math.sin(0.37 * step + index + 10.0 * rank)


def cursor_at(step: int) -> dict[str, int]:
    """Return a cursor with one number for each spool of an attempt, here the step instead of the
    byte."""
    ranks = [(rank, stream) for rank in range(NUM_RANKS) for stream in ("metrics", "log")]
    keys = [spool_key(rank, 0, stream) for rank, stream in ranks]
    return dict.fromkeys([*keys, spool_key(SUPERVISOR_RANK, 0, "metrics")], step)


def num_lines(rank: int, step: int) -> int:
    """Return the number of log lines that a rank has written up to this step."""
    return max(0, (step - rank + LINE_EVERY) // LINE_EVERY) - (rank == 0)


def step_at(cursor: dict[str, int]) -> int:
    return cursor[spool_key(0, 0, "metrics")]


@lru_cache(maxsize=1024)
def pickled(first: int, last: int, began: float) -> bytes:
    """Return the frames of the steps from `first` to `last`, as sent through the gateway's pipe.

    began: Unix time of step 0.
    """
    return pickle.dumps(tuple(_frames(range(first, last + 1), began)))


def _frames(steps: range, began: float) -> Iterator[Frame]:
    for rank in range(NUM_RANKS):
        for step in steps:
            names = names_of(rank)
            values = {name: value_of(rank, index, step) for index, name in enumerate(names)}
            body: dict[str, object] = {"step": step, "values": values}
            if rank == 0:
                body |= {"epoch": 3, "total_steps": TOTAL_STEPS, "samples_per_s": 1000.0}
            yield Frame(rank, 0, FrameKind.METRICS, began + step * PERIOD_S, body)
        for step in steps:
            if step % LINE_EVERY == rank:
                text = LINE.format(step=step, rank=rank, loss=value_of(0, 2, step))
                line = {"line": num_lines(rank, step) - 1, "text": text}
                yield Frame(rank, 0, FrameKind.LOG, began + step * PERIOD_S, line)
    for step in steps:
        if step % LEDGER_EVERY == LEDGER_EVERY - 1:
            used = {"useful": 7.0 * step, "data_wait": 0.5 * step, "idle": 0.5 * step}
            body = {"slot_seconds": used}
            yield Frame(SUPERVISOR_RANK, 0, FrameKind.LEDGER, began + step * PERIOD_S, body)
