"""The spares of jobs as the service records them: claims, slots, reports, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.shared.contracts import FrameKind, Phase
from ray_workers.shared.slices import Slice
from service.domain.attempts.group_traits import why_no_spares
from service.domain.errors import InvalidDocument, Unsatisfiable
from service.domain.scheduling import policy
from service.loops.shared.queue_view import snapshot
from tests.marks import ON_SQLITE, RULES
from tests.unit.service.helpers import Service, events_of, told
from tests.unit.service.lifecycle.test_resizing import growing, live, said

pytestmark = RULES

SPARES: dict[str, Any] = {"resources": {"num_workers": 2}, "elastic": {"spares": 1}}
RANKS, SPARE = Slice("node-a", 2), Slice("node-b", 1)


async def trains(service: Service, **fields: Any) -> str:
    """Return a job that trains on two ranks and has a spare on another node."""
    job_id = await service.submit(**{**SPARES, **fields})
    assert service.claim(job_id, workers=3) is not None
    on_a = Slice("node-a", 1)
    service.report(job_id, 1, [said(RANKS, on_a, world_size=2)], phase=Phase.RUNNING)
    return job_id


def ready(number: int) -> Any:
    return told(FrameKind.SPARES, {"ready": number, "message": "a spare is ready on node node-a"})


async def test_a_waiting_job_requests_slots_for_its_ranks_and_its_spares(service: Service) -> None:
    job_id = await service.submit(**SPARES)
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert waiting[0].request == policy.Request(3, {"CPU": 1.0}, num_spares=1)
    job = await service.jobs.get(job_id)
    assert (job.world_size, job.spares, job.spares_ready) == (2, 1, 0)


async def test_a_claim_leaves_the_last_slots_to_the_spares(service: Service) -> None:
    job_id = await service.submit(**SPARES)
    claimed = service.claim(job_id, workers=3)
    assert claimed is not None
    assert (claimed.world_size, claimed.num_slots, claimed.traits.most_ranks) == (2, 3, 2)
    job = await service.jobs.get(job_id)
    assert (job.world_size, job.reason.message) == (2, "starts 2 workers and 1 spare on 1 node")
    elastic = await service.submit(**{**SPARES, "elastic": {"spares": 1, "min_workers": 1}})
    claimed = service.claim(elastic, workers=2)
    assert claimed is not None
    assert (claimed.world_size, claimed.num_slots) == (2, 2)


@ON_SQLITE
async def test_the_number_of_ready_spares_is_shown_while_the_job_holds_slots(
    service: Service,
) -> None:
    job_id = await trains(service)
    service.report(job_id, 1, [ready(1)])
    job = await service.jobs.get(job_id)
    assert (job.world_size, job.spares, job.spares_ready) == (2, 1, 1)
    (event,) = await events_of(service, job_id, "spares")
    assert (event.message, event.data) == ("a spare is ready on node node-a", {"ready": 1})
    explained = await service.queries.explain(job_id)
    assert "1 of 1 spare is ready" in explained.reason.message
    service.end(job_id, 1)
    job = await service.jobs.get(job_id)
    assert (job.state.is_terminal, job.spares_ready) == (True, 0)


async def test_only_spares_are_released_by_a_group_with_a_fixed_number_of_ranks(
    service: Service,
) -> None:
    job_id = await trains(service)
    _, attempts = service.database.read_sync(lambda s: snapshot(s, service.now))
    (attempt,) = attempts
    assert attempt.running is not None
    assert attempt.running.spare == (Slice("node-a", 1),)
    assert growing(service, job_id) is None


async def test_a_group_that_lost_its_spares_slot_trains_and_may_get_another(
    service: Service,
) -> None:
    job_id = await trains(service)
    service.report(job_id, 1, [said(RANKS)])
    job = await service.jobs.get(job_id)
    assert (job.state, job.world_size) == (JobState.RUNNING, 2)
    seen = growing(service, job_id)
    assert seen is not None
    assert (seen.most, seen.lacking) == (1, 0)
    explained = await service.queries.explain(job_id)
    assert "0 of 1 spare has a slot" in explained.reason.message
    assert live(service, job_id).slices == (RANKS,)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a single rank": ({"resources": {"num_workers": 1}}, "a single rank does not recover"),
    "a divided model without copies": (
        {"parallel": {"shard": 2}, "checkpoint": {"in_memory": "off"}},
        "recover in place only if other ranks keep copies",
    ),
    "local steps": ({"sync": {"every": 4}}, "ranks that take local steps do not recover"),
    "gossip": ({"sync": {"kind": "gossip"}}, "continue at once without a lost rank"),
    "compression on GPUs": (
        {
            "resources": {"num_workers": 2, "gpus_per_worker": 1},
            "sync": {"compression": {"name": "powersgd"}},
        },
        "sync.compression does not recover in place",
    ),
    "a script of another framework on GPUs": (
        {
            "recipe": None,
            "script": {"entrypoint": "train.py", "framework": "jax"},
            "resources": {"num_workers": 2, "gpus_per_worker": 1},
        },
        "only scripts with torch",
    ),
    "a divided script": (
        {
            "recipe": None,
            "script": {"entrypoint": "train.py"},
            "resources": {"num_workers": 4},
            "parallel": {"shard": 2},
        },
        "scripts whose ranks divide a model among themselves do not recover",
    ),
    "a script of another framework": (
        {"recipe": None, "script": {"entrypoint": "train.py", "framework": "jax"}},
        "only scripts with torch",
    ),
}
ALLOWED: dict[str, dict[str, Any]] = {
    "replicas": {},
    "replicas on GPUs": {"resources": {"num_workers": 2, "gpus_per_worker": 1}},
    "a divided model": {"parallel": {"shard": 2}},
    "a script": {"recipe": None, "script": {"entrypoint": "train.py"}},
    "a script on GPUs": {
        "recipe": None,
        "script": {"entrypoint": "train.py"},
        "resources": {"num_workers": 2, "gpus_per_worker": 1},
    },
    "a divided model that changes its size": {
        "resources": {"num_workers": 4},
        "parallel": {"shard": 2},
        "elastic": {"spares": 1, "min_workers": 2},
    },
}


def spec_of(fields: dict[str, Any]) -> JobSpec:
    return JobSpec.model_validate({"recipe": "image_classification", **SPARES, **fields})


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_never_recover_in_place_can_not_use_spares(name: str) -> None:
    fields, why = REFUSED[name]
    spec = spec_of(fields)
    found = why_no_spares(spec, has_gpus=spec.resources.gpus_per_worker > 0)
    assert found is not None
    assert why in found


@pytest.mark.parametrize("name", ALLOWED)
def test_groups_that_recover_in_place_can_use_spares(name: str) -> None:
    spec = spec_of(ALLOWED[name])
    assert why_no_spares(spec, has_gpus=spec.resources.gpus_per_worker > 0) is None


@ON_SQLITE
async def test_useless_spares_are_refused_with_a_fix_and_nothing_is_stored(
    service: Service,
) -> None:
    with pytest.raises(InvalidDocument, match="can't use spares: a single rank") as refused:
        await service.submit(resources={"num_workers": 1}, elastic={"spares": 1})
    assert (refused.value.pointer, refused.value.hint) == (
        *("/elastic/spares",),
        "remove elastic.spares",
    )
    waiting, _ = service.database.read_sync(lambda s: snapshot(s, service.now))
    assert not waiting


@ON_SQLITE
async def test_spares_count_in_the_limits_of_a_queue(service: Service) -> None:
    await service.queue("small", limit={"CPU": 2})
    with pytest.raises(Unsatisfiable, match="needs 3 workers, 1 of them spare") as refused:
        await service.submit(**SPARES, queue="small")
    assert refused.value.pointer == "/queue"
    await service.submit(**{**SPARES, "elastic": None}, queue="small")
