"""The record of a process's collectives. The process appends the record to the file that contains
the stacks of its threads, and the supervisor parses it.

torch's flight recorder numbers the collectives of each group, and keeps the last 2000 collectives
of all groups. Sends and receives between two ranks are ignored. Reading a full record takes 0.1 s,
during which the process does nothing else.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_workers.shared.processes import compat_torch

_HEADING = "Collectives of torch.distributed:"
_LINE = re.compile(
    r"^  group (?P<group>\S+): (?P<begun>\d+) begun"
    r"(, in number (?P<waits_in>\d+) \((?P<name>[^)]*)\) for (?P<waits_s>[\d.]+) s)?$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class GroupRecord:
    """A process's collectives in one group."""

    group: str
    begun: int
    """Number of the last collective that the process began, counting from 1; 0 if none."""
    waits_in: int = 0
    """Number of the first collective that has begun but not ended; 0 if none."""
    name: str = ""
    """Name of the collective with number `waits_in`, such as `gloo:all_reduce`."""
    waits_s: float = 0.0

    def line(self) -> str:
        waits = f", in number {self.waits_in} ({self.name}) for {self.waits_s:.1f} s"
        return f"  group {self.group}: {self.begun} begun{waits if self.waits_in else ''}"


def described() -> str:
    """Describe this process's collectives in a paragraph. Return an empty string if there are no
    groups or no record."""
    records = recorded()
    if not records:
        return ""
    return "\n".join(["", _HEADING, *(one.line() for one in records), ""])


def parse(stacks: str) -> list[GroupRecord]:
    """Parse the records in a process's stacks. The stacks end with the output of `described`."""
    _, _, paragraph = stacks.partition(f"\n{_HEADING}\n")
    return [
        GroupRecord(
            found["group"],
            int(found["begun"]),
            int(found["waits_in"] or 0),
            found["name"] or "",
            float(found["waits_s"] or 0.0),
        )
        for found in _LINE.finditer(paragraph)
    ]


def recorded() -> list[GroupRecord]:
    """Return the records of this process's groups, except groups whose entries were overwritten."""
    groups = compat_torch.group_names()
    if not groups:
        return []
    dumps = [json.loads(dump).get("entries", []) for dump in compat_torch.flight_records()]
    if not dumps:
        return []
    is_whole = not any(entries and entries[0]["record_id"] > 0 for entries in dumps)
    of_group: dict[str, list[Mapping[str, Any]]] = {name: [] for name in groups}
    for entry in (entry for entries in dumps for entry in entries if not entry["is_p2p"]):
        if entry["process_group"][0] in of_group:
            of_group[entry["process_group"][0]].append(entry)
    now = time.time()
    return [
        _record(name, entries, now) for name, entries in of_group.items() if entries or is_whole
    ]


def _record(group: str, entries: list[Mapping[str, Any]], now: float) -> GroupRecord:
    if not entries:
        return GroupRecord(group, 0)
    newest = max(entry["pg_id"] for entry in entries)  # an earlier group may have had the same name
    own = [entry for entry in entries if entry["pg_id"] == newest]
    begun = max(entry["collective_seq_id"] for entry in own)
    under_way = [e for e in own if not e["retired"] and e["state"] != "completed"]
    if not under_way:
        return GroupRecord(group, begun)
    first = min(under_way, key=lambda entry: int(entry["collective_seq_id"]))
    waits_s = max(0.0, now - first["time_created_ns"] / 1e9)
    name = first["profiling_name"].replace(")", "")
    return GroupRecord(group, begun, first["collective_seq_id"], name, waits_s)
