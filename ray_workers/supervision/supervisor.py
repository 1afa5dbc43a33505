"""The supervisor is a detached actor that owns the slots and processes of one attempt.

The supervisor occupies no slot. The supervisor runs only on control nodes, because the group ends
if the supervisor is lost. If the service is stopped, the supervisor continues to run: training
continues while the service does not poll, and the reports of the ranks are kept in the spools.

The supervisor ends when the service acknowledges its last reply, unless it is shared: a shared
supervisor runs short attempts of the jobs of one array, one after another. Everything that belongs
to an attempt is in an `AttemptRun`, which is dropped at the end of the attempt. An idle supervisor
holds no resources, and exits on its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass

import ray

from ray_workers.node import compat_ray
from ray_workers.shared.commands import Command
from ray_workers.shared.contracts import AttemptSpec, PollReply
from ray_workers.shared.names import repr_name, supervisor_name
from ray_workers.supervision import rank_actor
from ray_workers.supervision.attempt_run import AttemptRun

IDLE_S = 2.0
"""Seconds after which an idle supervisor exits."""
RESERVED_S = 30.0
"""Seconds after which a reserved supervisor exits. Between `reserve` and `begin`, the driver calls
Ray's GCS, which can take longer than `IDLE_S`, for example while the GCS is suspended briefly."""
MAX_ATTEMPTS = 100
"""Number of attempts after which a shared supervisor is replaced, so that a leak in it stays
small."""
Key = tuple[str, int]
"""(job id, attempt number)."""
Series = tuple[str | None, str]
"""(owner, name) of the jobs whose attempts can share a supervisor."""


def series_of(spec: AttemptSpec) -> Series | None:
    """Return the series of an attempt; None if its job is not in an array."""
    is_in_array = spec.array_index is not None
    return (spec.environment_policy.owner, spec.job_name) if is_in_array else None


@dataclass(frozen=True)
class Farewell:
    """The answer of a supervisor that has dropped an attempt."""

    series: Series | None
    was_routine: bool
    """`AttemptRun.was_routine`."""
    idle_as: str | None
    """The name of the supervisor if it is now idle; None if the caller must end it."""
    node_id: str


@ray.remote(num_cpus=0, max_restarts=0)
class Supervisor:
    """Runs an attempt. Each call names the attempt for which it is meant."""

    def __init__(self, spec: AttemptSpec, rank_actor_code: bytes, shared_name: str | None) -> None:
        """`rank_actor_code` identifies the exported code of the rank actor: see
        `compat_ray.export_class`. `shared_name` is the actor's name if the supervisor is shared."""
        # RankActor is accessed through its module, because Ray pickles the Supervisor class by
        # value, with copies of the classes that it uses directly.
        compat_ray.use_exported_class(rank_actor.RankActor, rank_actor_code)
        self._series = series_of(spec)
        self._shared_name = shared_name
        attempt_name = repr_name(spec.job_name, supervisor_name(spec.job_id, spec.attempt))
        self._shown = f"{spec.job_name}:supervisor" if shared_name else attempt_name
        self._refused: set[Key] = set()
        """Attempts that some gateway believes to be lost, and that therefore must not start."""
        self._num_attempts = 0
        self._exit: asyncio.TimerHandle | None = None
        self._has_left = False
        self._run: AttemptRun | None = None
        self._key: Key | None = None
        self._start(spec)

    def __repr__(self) -> str:
        return self._shown

    def _start(self, spec: AttemptSpec) -> None:
        self._num_attempts += 1
        self._key = (spec.job_id, spec.attempt)
        self._run = AttemptRun(spec)

    def _exit_after(self, wait_s: float) -> None:
        if self._exit is not None:
            self._exit.cancel()
        self._exit = asyncio.get_running_loop().call_later(wait_s, self._leave)

    def _leave(self) -> None:
        self._has_left = True
        _end_own_process()

    @property
    def _is_idle(self) -> bool:
        return self._run is None and not self._has_left

    async def reserve(self) -> bool:
        """Whether the supervisor is idle. If the supervisor is idle, it waits `RESERVED_S` for
        `begin`."""
        if self._is_idle:
            self._exit_after(RESERVED_S)
        return self._is_idle

    async def begin(self, spec: AttemptSpec) -> None:
        """Run another attempt. If the attempt can't start, polls show that the attempt has no
        supervisor."""
        is_refused = (spec.job_id, spec.attempt) in self._refused
        if self._is_idle and series_of(spec) == self._series and not is_refused:
            self._start(spec)
            if self._exit is not None:  # after the start, which can fail
                self._exit.cancel()

    async def poll(
        self, key: Key, cursor: Mapping[str, int], wait_s: float, max_bytes: int
    ) -> PollReply | None:
        """`AttemptRun.poll`. None if this is not the supervisor of the attempt, and never will
        be."""
        if self._run is None or self._key != key:
            self._refused.add(key)
            return None
        return await self._run.poll(cursor, wait_s, max_bytes)

    async def carry_out(self, key: Key, command: Command) -> None:
        """`AttemptRun.carry_out`. Commands for other attempts are late, and have no effect."""
        if self._run is not None and self._key == key:
            await self._run.carry_out(command)

    async def acknowledge(self, key: Key) -> Farewell | None:
        """Drop an attempt, because the service has stored its last reply. None if this is not the
        supervisor of the attempt."""
        run = self._run
        if run is None or self._key != key:
            return None
        self._run = None
        try:
            await run.drop()
        finally:
            self._exit_after(IDLE_S)
        is_kept = run.was_routine and self._num_attempts < MAX_ATTEMPTS
        node_id = ray.get_runtime_context().get_node_id()
        idle_as = self._shared_name if is_kept else None
        return Farewell(self._series, run.was_routine, idle_as, node_id)


def _end_own_process() -> None:
    try:
        ray.kill(ray.get_runtime_context().current_actor)
    except Exception:  # Ray is gone
        os._exit(0)
