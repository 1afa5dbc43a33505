"""The life of one document: checked, stored, read back, planned, launched, run and ended."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import jsonschema
from sqlalchemy import func, select

from api.problems import STATUS
from dray import views
from dray.filters import JobFilter
from dray.input import validation
from dray.input.validation import Fault
from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.shared.contracts import AttemptSpec
from service.db.models import JobRow
from service.domain.documents import read
from service.domain.errors import DomainError
from service.runtime import Runtime
from tests.generated.documents.drawing import SCHEMA, leaves, parts_of, step
from tests.unit.service.loops.world import World, eventually, trains

SCHEMA_CHECK = jsonschema.Draft202012Validator(SCHEMA)
NODES = {
    "gpus": {
        "CPU": 64.0,
        "GPU": 8.0,
        "memory": 2.0**38,
        "accelerator_type:H100": 1.0,
        "label:site=a": 1.0,
    },
    "cpus": {"CPU": 64.0, "memory": 2.0**38, "label:site=b": 1.0},
}
ROUNDS = 60
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
BYTES = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
MOST_JOBS = 20


class Followed:
    """One service with its loops, over a cluster in memory."""

    def __init__(self, world: World, runtime: Runtime) -> None:
        self.world = world
        self.runtime = runtime

    @classmethod
    async def open(cls, world: World) -> Followed:
        world.plays = defaultdict(lambda: trains)
        for name in list(world.fake.nodes):
            del world.fake.nodes[name]
        for name, resources in NODES.items():
            world.fake.add_node(name, resources)
        runtime = await world.open()

        async def seen() -> bool:
            return len((await runtime.queries.cluster()).nodes) == len(NODES)

        await eventually(seen, "the nodes were never seen")
        return cls(world, runtime)

    async def follow(self, document: dict[str, Any]) -> str:
        """Return how a document that is valid, or is made valid, ends."""
        given = copy.deepcopy(document)
        job = await self._submitted(given)
        if job is None:
            return "refused"
        stored = job.spec
        arrives(given, stored)
        spec = read(stored)
        without = {name: value for name, value in stored.items() if name != "version"}
        assert read(without) == read({**stored, "version": 1}) == spec, "documents of version 1"
        assert read(spec.without_defaults()) == read(spec.as_given()) == spec, "no field is lost"
        if spec.begin_at is not None and spec.begin_at > datetime.now(UTC):
            why = await self.runtime.queries.explain(job.id)
            assert why.reason.code == "begins_at", why.reason
            await self.runtime.jobs.cancel(job.id)
            return "launched"
        if spec.array is not None or spec.sweep is not None:
            await self._end_all(job, spec.num_jobs)
            return "launched"
        launch = await self._launched(job, spec)
        silos = (given.get("federated") or {}).get("silos") or ()
        assert launch.silo_sources == tuple(silo.get("source") for silo in silos)
        return "launched"

    async def _submitted(self, document: dict[str, Any]) -> views.Job | None:
        """Return the job, after everything that is refused has been removed."""
        for _ in range(ROUNDS):
            answer = await self.submit(document)
            if isinstance(answer, views.Job):
                return answer
            pointer = named(document, answer)
            if not take_out(document, pointer):
                return None
        return None

    def _num_jobs(self) -> int:
        count = select(func.count()).select_from(JobRow)
        return self.runtime.database.read_sync(lambda session: session.scalar(count)) or 0

    async def submit(self, document: dict[str, Any]) -> views.Job | Fault | DomainError:
        """Do the same as the API."""
        before = self._num_jobs()
        is_valid = SCHEMA_CHECK.is_valid(document)
        try:
            validation.check_values(document)
            spec = validation.check(document)
            assert is_valid, [e.message for e in SCHEMA_CHECK.iter_errors(document)]
            if spec.num_jobs > MOST_JOBS:
                place = "/array" if spec.array else "/sweep"
                return Fault("invalid_document", "too many for a test", place)
            job, _ = await self.runtime.jobs.submit(spec)
        except (Fault, DomainError) as refusal:
            found = refusal
        else:
            return job
        assert 400 <= STATUS[found.code] < 500, found
        assert self._num_jobs() == before, "what is refused is not stored"
        return found

    async def _launched(self, job: views.Job, spec: JobSpec) -> AttemptSpec:
        """The job starts at once on the idle cluster, as its document requests, and ends."""
        ended = await self._ends(job.id)
        assert ended.state is JobState.SUCCEEDED, ended.reason
        (launch,) = [one for one in self.world.fake.launches if one.job_id == job.id]
        assert launch.spec == job.spec
        assert JobSpec.model_validate(launch.spec) == spec, "what the ranks read"
        is_as_asked(launch, job.spec)
        return launch

    async def _ends(self, job_id: str) -> views.Job:
        job = await self.runtime.jobs.get(job_id)
        for _ in range(30):
            if job.state.is_terminal:
                return job
            job = await self.runtime.jobs.wait(job_id, wait_s=2.0, known_state=job.state)
        why = await self.runtime.queries.explain(job_id)
        raise AssertionError(f"it stays {job.state}: {why.reason.code} {why.reason.message}")

    async def _end_all(self, job: views.Job, number: int) -> None:
        assert job.array_id is not None
        jobs = (await self.runtime.jobs.list(JobFilter(array=job.array_id))).items
        assert len(jobs) == number
        for one in jobs:
            ended = await self._ends(one.id)
            assert ended.state is JobState.SUCCEEDED, ended.reason


def named(document: dict[str, Any], refusal: Fault | DomainError) -> str:
    """Return the pointer of a refusal, which must be in the document or name a missing field."""
    detail = refusal.detail if isinstance(refusal, Fault) else refusal.message
    assert detail.strip(), refusal
    assert refusal.pointer is not None, f"no field is named: {detail}"
    *parents, _ = parts_of(refusal.pointer) or [""]
    node: Any = document
    for part in parents:
        if part not in node:
            break
        node = step(node, part)
    return refusal.pointer


def take_out(document: dict[str, Any], pointer: str) -> bool:
    """Remove what a refusal names, or the parent of a missing field. False if all jobs need it."""
    parts = parts_of(pointer)
    while parts:
        node: Any = document
        try:
            for part in parts[:-1]:
                node = step(node, part)
            step(node, parts[-1])
        except (KeyError, IndexError, ValueError):
            parts.pop()
            continue
        if parts[0] in ("recipe", "script") and len(parts) == 1:
            return False
        if isinstance(node, list):
            del node[int(parts[-1])]
        else:
            del node[parts[-1]]
        return True
    optional = [name for name in document if name not in ("recipe", "script", "data")]
    if not optional:
        return False
    del document[optional[-1]]
    return True


def arrives(given: dict[str, Any], stored: dict[str, Any]) -> None:
    """Check that every value of the document is stored in its place."""
    swept = (given.get("sweep") or {}).get("parameters", {})
    for pointer, value in leaves(given):
        parts = parts_of(pointer)
        if ".".join(parts) in swept:
            continue  # each trial has its own value
        if parts[0] in ("array", "sweep", "after") or value in (None, [], {}):
            continue
        if re.fullmatch("/federated/silos/[0-9]+/source", pointer):
            continue  # only for the silo's node
        if parts[0] in ("parallel", "sync") and "auto" in str(given[parts[0]]):
            continue  # chosen by the service
        node: Any = stored
        for part in parts:
            node = step(node, part)
        assert same(value, node), f"{pointer}: {value!r} became {node!r}"


def same(given: Any, stored: Any) -> bool:
    if isinstance(given, str) and isinstance(stored, int):
        found = re.fullmatch(r"([0-9]+)([A-Za-z]+)", given)
        assert found is not None, given
        unit = found[2].lower()
        return int(found[1]) * (SECONDS.get(unit) or BYTES[unit]) == stored
    if isinstance(stored, float) and not isinstance(given, bool):
        return float(given) == stored
    return isinstance(given, bool) == isinstance(stored, bool) and bool(given == stored)


def is_as_asked(launch: AttemptSpec, stored: dict[str, Any]) -> None:
    """Check that the request to the cluster matches the document."""
    wanted, elastic = stored["resources"], stored.get("elastic")
    least = (elastic or {}).get("min_workers")
    most = wanted["num_workers"] + (elastic or {}).get("spares", 0)
    assert (most if least is None else least) <= launch.num_slots <= most
    assert launch.world_size == min(launch.num_slots, wanted["num_workers"])
    assert launch.world_size % launch.traits.mesh.num_parts == 0
    assert launch.bundle.get("CPU", 0.0) == wanted["cpus_per_worker"]
    assert launch.bundle.get("GPU", 0.0) == wanted["gpus_per_worker"]
    assert launch.bundle.get("memory") == wanted["memory_bytes"]
    assert launch.max_runtime_s == stored["max_runtime_s"]
    roles = (stored.get("script") or {}).get("roles", {})
    own = {name: role["resources"]["cpus"] for name, role in roles.items() if role["resources"]}
    servers = (stored.get("sync") or {}).get("server_resources")
    own |= {"server": servers["cpus"]} if servers else {}
    assert {role.role: role.bundle["CPU"] for role in launch.roles} == own
    accelerator = wanted["accelerator"]
    if accelerator is not None:
        assert f"accelerator_type:{accelerator}" in launch.bundle
    assert launch.min_workers == least
