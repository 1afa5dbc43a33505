"""Which optimizer steps were committed by which process and when, and the resulting recovery times.

The peers' ranks write a log of their commits. This module imports only the standard library, so
that its cost for them is negligible.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median


@dataclass(frozen=True)
class Commit:
    """The end of one optimizer step on one rank."""

    rank: int
    process: str
    """Distinguishes the processes of a rank."""
    generation: int
    """Distinguishes the groups of one process."""
    step: int
    """The first step is 1."""
    at: float
    """Unix seconds."""

    @property
    def member(self) -> tuple[int, str, int]:
        return self.rank, self.process, self.generation


@dataclass(frozen=True)
class Recovery:
    """The cost of the death of one rank. Times are in seconds since its kill."""

    next_s: float
    """Until the next step of a group without the dead process."""
    steps_lost: int
    """Number of steps that had been committed before and were repeated."""
    caught_up_s: float | None = None
    """Until the first step that had not been committed before. None if it was not observed."""
    whole_s: float | None = None
    """Until the first step of the rank's replacement. None if it was not observed."""
    step_s: float | None = None
    """Duration of a step before the kill, the median. None if less than two were observed."""


def recovery(commits: Iterable[Commit], *, killed_at: float, killed_rank: int) -> Recovery | None:
    """Return the recovery of the group, or None if no other group has committed a step yet.

    A survivor can still commit a step of the broken group after the kill, which is not a recovery.
    """
    ordered = sorted(commits, key=lambda commit: commit.at)
    broken = {commit.member for commit in ordered if commit.at <= killed_at}
    reached = max((commit.step for commit in ordered if commit.member in broken), default=0)
    after = [commit for commit in ordered if commit.member not in broken]
    if not after:
        return None
    times = [
        commit.at for commit in ordered if commit.rank != killed_rank and commit.member in broken
    ]
    durations = [later - earlier for earlier, later in pairwise(times)]
    beyond = [commit.at - killed_at for commit in after if commit.step > reached]
    replaced = [commit.at - killed_at for commit in after if commit.rank == killed_rank]
    return Recovery(
        next_s=after[0].at - killed_at,
        steps_lost=max(0, reached + 1 - after[0].step),
        caught_up_s=beyond[0] if beyond else None,
        whole_s=replaced[0] if replaced else None,
        step_s=median(durations) if durations else None,
    )


def lost_of_a_minute(recoveries: Sequence[Recovery]) -> float | None:
    """Return the mean share of a minute that is lost due to one kill, or None if a recovery was not
    fully observed.

    Until the job has caught up, no progress is made, and until it is complete again, one of the two
    ranks is idle.
    """
    lost_s = []
    for each in recoveries:
        if each.caught_up_s is None or each.whole_s is None:
            return None
        lost_s.append(max(each.caught_up_s, (each.next_s + each.whole_s) / 2))
    return sum(lost_s) / len(lost_s) / 60 if lost_s else None


class CommitLog:
    """The log of one process of a rank, with `generation step time` for each commit."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = open(folder / f"r{rank}.{os.getpid()}.commits", "a", buffering=1)  # noqa: SIM115

    def committed(self, step: int, generation: int = 0) -> None:
        self._file.write(f"{generation} {step} {time.time():.6f}\n")


def read(folder: Path, rank: int | None = None) -> list[Commit]:
    """Return everything that all ranks, or one rank, have logged so far."""
    found = []
    for path in sorted(folder.glob(f"r{'*' if rank is None else rank}.*.commits")):
        who, process, _ = path.name.split(".")
        found += parse(path.read_text(), rank=int(who.removeprefix("r")), process=process)
    return found


def parse(text: str, *, rank: int, process: str) -> list[Commit]:
    """Return the commits in one log, except for an incomplete last line."""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [
        Commit(rank, process, int(generation), int(step), float(at))
        for generation, step, at in lines
    ]
