"""Finds ranks that have not joined a collective operation in which other ranks are waiting. The
module is pure, and imports neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from ray_workers.shared.processes.collectives import GroupRecord, parse

Records = Mapping[int, Sequence[GroupRecord]]
"""The records of torch's flight recorder, keyed by rank."""


@dataclass(frozen=True)
class Waiting:
    """The first collective of a process group in which ranks are waiting."""

    group: str
    number: int
    name: str
    waiting: tuple[int, ...]
    """Ranks that are waiting in the collective."""
    absent: tuple[int, ...]
    """Ranks of the process group that have not started the collective."""

    def sentence(self) -> str:
        ranks = ", ".join(map(str, self.waiting))
        who = f"rank {ranks} is waiting" if len(self.waiting) == 1 else f"ranks {ranks} are waiting"
        collective = f"collective {self.number} ({self.name}) of group {self.group}"
        return f"This rank has not joined {collective}, in which {who}."


def records_of(stacks: Mapping[int, str]) -> Records:
    """Return the flight recorder's records in each rank's stack-trace output, keyed by rank.
    Ranks without records are omitted."""
    found = {rank: parse(text) for rank, text in stacks.items()}
    return {rank: records for rank, records in found.items() if records}


def waiting_in(records: Records) -> Iterator[Waiting]:
    """For each process group in which ranks are waiting, yield the first collective in which they
    are waiting."""
    by_group: dict[str, dict[int, GroupRecord]] = {}
    for rank, own in records.items():
        for record in own:
            by_group.setdefault(record.group, {})[rank] = record
    for group, members in by_group.items():
        waits = {rank: one for rank, one in members.items() if one.waits_in}
        if not waits:
            continue
        first = min(waits.values(), key=lambda one: one.waits_in)
        yield Waiting(
            group,
            first.waits_in,
            first.name,
            tuple(sorted(rank for rank, one in waits.items() if one.waits_in == first.waits_in)),
            tuple(sorted(rank for rank, one in members.items() if one.begun < first.waits_in)),
        )


def absent_ranks(stacks: Mapping[int, str]) -> set[int]:
    """Return the ranks for which other ranks are waiting. If some of these ranks are not waiting
    themselves, return only the ranks that are not waiting."""
    records = records_of(stacks)
    absent = {rank for one in waiting_in(records) for rank in one.absent}
    waiting = {rank for rank, own in records.items() if any(one.waits_in for one in own)}
    return absent - waiting or absent


def with_absences(stacks: Mapping[int, str]) -> dict[int, str]:
    """Return the stacks, with a note added for each rank that has not joined a collective."""
    noted = dict(stacks)
    for one in waiting_in(records_of(stacks)):
        for rank in one.absent:
            noted[rank] = f"{noted[rank].rstrip()}\n\n{one.sentence()}\n"
    return noted


def longest_wait_s(stacks: Mapping[int, str]) -> float:
    """Return the number of seconds for which the longest-running collective has been running, or
    0.0 if none is running."""
    every = records_of(stacks).values()
    return max((one.waits_s for own in every for one in own), default=0.0)


def stood_still(earlier: Mapping[int, str], later: Mapping[int, str], idle: Set[int]) -> bool:
    """Whether no rank started or finished a collective between two observations, while some ranks
    were waiting in a collective and all other ranks were idle."""
    before, now = records_of(earlier), records_of(later)
    if not now or before.keys() != now.keys() or now.keys() != later.keys():
        return False
    if any(_counts(before[rank]) != _counts(now[rank]) for rank in now):
        return False
    waiting = {rank for rank, own in now.items() if any(one.waits_in for one in own)}
    return bool(waiting) and now.keys() <= waiting | idle


def _counts(records: Sequence[GroupRecord]) -> set[tuple[str, int, int]]:
    return {(one.group, one.begun, one.waits_in) for one in records}
