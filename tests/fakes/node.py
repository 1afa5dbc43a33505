"""A node of the fake cluster: its resources, who holds them, and the spools on its disk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import Frame, FrameKind
from ray_workers.shared.quarantine import Quarantined

EPSILON = 1e-6


class Pulse:
    """Wakes all waiting tasks whenever something happens."""

    def __init__(self) -> None:
        self._beat = asyncio.Event()

    def beat(self) -> None:
        self._beat.set()
        self._beat = asyncio.Event()

    async def wait(self, deadline: float | None) -> bool:
        """Wait for the next event. Return False once the deadline (in the event loop's time) has
        passed."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._beat.wait()
        except TimeoutError:
            return False
        return True


class Spool:
    """A sequence of JSON lines, addressed by byte offset. Delivered lines are forgotten."""

    def __init__(self) -> None:
        self._data = b""
        self._start = 0
        self._errors = b""

    def append(self, kind: FrameKind, body: Mapping[str, Any], at: float) -> None:
        """at: Unix seconds."""
        frame = {"kind": kind, "time": at, "body": dict(body)}
        line = json.dumps(frame).encode() + b"\n"
        self._data += line
        if kind is FrameKind.ERROR:
            self._errors += line

    def discard(self, before: int) -> None:
        if before > self._start:
            self._data = self._data[before - self._start :]
            self._start = before

    def read(self, offset: int, max_bytes: int) -> tuple[bytes, int]:
        """Return whole frames from `offset` on, at least one if there is any, and the offset where
        they end."""
        begin = max(offset - self._start, 0)
        data = self._data[begin : begin + max_bytes]
        cut = data.rfind(b"\n") + 1 or self._data.find(b"\n", begin) + 1 - begin
        chunk = self._data[begin : begin + max(cut, 0)]
        return chunk, self._start + begin + len(chunk)

    def has_more(self, offset: int) -> bool:
        """Whether it has frames from `offset` on that are not forgotten."""
        return max(offset - self._start, 0) < len(self._data)

    def errors(self, key: str) -> list[Frame]:
        """Return the error frames, including delivered ones."""
        return list(spool_reader.decode(key, self._errors))


@dataclass
class FakeNode:
    """A node: its resources, who holds them, and the spools on its disk."""

    resources: dict[str, float]
    problem: str | None = None
    """Why it may not run ranks."""
    full: str | None = None
    """Why its disk accepts no files."""
    others: dict[str, float] = field(default_factory=dict)
    """Resources held by other users of the cluster."""
    held: dict[str, float] = field(default_factory=dict)
    quarantined: list[Quarantined] = field(default_factory=list)
    drained_by: float | None = None
    """Unix time at which it leaves the cluster, if it is draining."""
    is_released: bool = False
    """Whether it was released to the autoscaler."""
    is_never_released: bool = False
    """Whether it is the head node."""
    spools: dict[tuple[str, int], dict[str, Spool]] = field(default_factory=dict)

    work_dirs: set[str] = field(default_factory=set)
    """Jobs with a working directory on this node."""

    def free(self) -> dict[str, float]:
        return {
            name: amount - self.held.get(name, 0.0) - self.others.get(name, 0.0)
            for name, amount in self.resources.items()
        }

    def take(self, bundle: Mapping[str, float], times: int) -> bool:
        """Hold `times` bundles. Hold nothing and return False if they are not free."""
        free = self.free()
        if any(free.get(name, 0.0) + EPSILON < times * need for name, need in bundle.items()):
            return False
        for name, need in bundle.items():
            self.held[name] = self.held.get(name, 0.0) + times * need
        return True

    def release(self, bundle: Mapping[str, float], times: int) -> None:
        for name, need in bundle.items():
            self.held[name] -= times * need

    def spool_of(self, job_id: str, attempt: int, key: str) -> Spool:
        return self.spools.setdefault((job_id, attempt), {}).setdefault(key, Spool())

    def read(
        self, job_id: str, attempt: int, cursor: Mapping[str, int], max_bytes: int
    ) -> dict[str, tuple[bytes, int]]:
        """Return new frames from each spool of an attempt and the offsets where they end. Forget
        stored frames."""
        spools = self.spools.get((job_id, attempt), {})
        found = {}
        for key in sorted(spools):
            spools[key].discard(cursor.get(key, 0))
            chunk, end = spools[key].read(cursor.get(key, 0), max(max_bytes // len(spools), 1))
            if chunk:
                found[key] = (chunk, end)
        return found

    def has_more(self, job_id: str, attempt: int, cursor: Mapping[str, int]) -> bool:
        """Whether any spool of an attempt has frames after the cursor."""
        spools = self.spools.get((job_id, attempt), {})
        return any(spool.has_more(cursor.get(key, 0)) for key, spool in spools.items())

    def drop(self, job_id: str, attempt: int) -> None:
        self.spools.pop((job_id, attempt), None)
