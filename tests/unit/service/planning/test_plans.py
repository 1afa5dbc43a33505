"""Plans for the known cluster, and their use at submission."""

from __future__ import annotations

from typing import Any

import pytest

from dray import views
from dray.requests import PlanRequest
from dray.spec import JobSpec
from ray_workers.shared.contracts import COMPUTE_TIME
from ray_workers.shared.node_needs import DataPolicy
from service.domain.errors import NotPlannable, OutOfMemory
from service.planning.calibration import STEP_TIME
from service.planning.model.memory import memory_of
from service.planning.model.shapes import shapes_of
from service.planning.service import Plans
from tests.marks import RULES
from tests.unit.service.helpers import Service, metrics, resumed
from tests.unit.service.jobs.test_jobs import see_cluster

pytestmark = RULES

GIB = 1 << 30
LARGE = {"name": "gpt", "num_layers": 48, "num_heads": 32, "width": 8192, "context_length": 512}


def text(num_workers: int = 2, **parts: Any) -> dict[str, Any]:
    return {
        "recipe": "language_model",
        "data": {"source": "file:///text.txt"},
        "train": {"global_batch_size": 16},
        "resources": {"num_workers": num_workers},
        **parts,
    }


def plans_of(service: Service) -> Plans:
    return Plans(service.database, lambda _: DataPolicy.open())


async def test_a_plan_tells_of_every_mesh_and_what_is_not_known(service: Service) -> None:
    plan = await plans_of(service).plan(PlanRequest.model_validate(text()))
    names = {mesh.name for mesh in plan.meshes}
    assert names == {"data 2", "shard 2", "tensor 2", "pipeline 2", "context 2"}
    assert plan.chosen == plan.meshes[0].name
    assert plan.memory_bytes_per_rank is None
    assert "resources.memory_bytes" in plan.memory_source
    assert all(mesh.missing_bytes is None for mesh in plan.meshes)


async def test_what_a_request_gives_is_what_a_plan_counts_with(service: Service) -> None:
    given = {"memory_bytes_per_rank": 1000, "flops_per_s": 1e6}
    plan = await plans_of(service).plan(PlanRequest.model_validate(text() | given))
    assert plan.chosen is None
    assert (plan.memory_bytes_per_rank, plan.calibration.flops_per_s) == (1000, 1e6)
    assert plan.calibration.source.startswith("flops_per_s as given")
    for mesh in plan.meshes:
        assert mesh.missing_bytes == mesh.memory.total_bytes - 1000


async def ran(service: Service, step_time_s: float, num_steps: int = 30, **parts: Any) -> None:
    """Run a job that succeeds, with steps of this duration."""
    job_id = await service.running(**text(**parts))
    steps = (metrics(step, {STEP_TIME: step_time_s}) for step in range(1, num_steps + 1))
    service.report(job_id, 1, [resumed(0), *steps])
    service.end(job_id, 1)


async def planned(service: Service, **parts: Any) -> views.Plan:
    return await plans_of(service).plan(PlanRequest.model_validate(text(**parts)))


async def test_times_are_those_that_jobs_here_have_shown(service: Service) -> None:
    before = await planned(service)
    assert "not measured" in before.calibration.source
    await ran(service, 2.0)
    await ran(service, 8.0)  # a slower job does not lower the worker's speed
    after = await planned(service)
    assert after.calibration.source.startswith("speed measured in the last 2 jobs on workers")
    (one,) = (mesh for mesh in after.meshes if mesh.name == "data 2")
    assert one.step_time_s == pytest.approx(2.0)
    quick = await planned(service, resources={"num_workers": 2, "cpus_per_worker": 4})
    assert quick.meshes[0].compute_s == pytest.approx(after.meshes[0].compute_s / 4)


async def test_what_ran_elsewhere_or_hardly_at_all_says_nothing(service: Service) -> None:
    await ran(service, 2.0, num_steps=5)
    await ran(service, 2.0, resources={"num_workers": 1, "gpus_per_worker": 1})
    found = await planned(service)
    assert "not measured" in found.calibration.source


async def test_a_job_that_mostly_sent_says_how_fast_it_computed_at_least(service: Service) -> None:
    """The time for sending is not known precisely enough to determine the exact speed."""
    default = (await planned(service)).calibration.flops_per_s
    model = {"width": 1024, "num_layers": 1, "context_length": 4}
    wide = {"model": model, "train": {"global_batch_size": 2}}
    (mostly_sends,) = (m for m in (await planned(service, **wide)).meshes if m.name == "data 2")
    assert mostly_sends.send_s > mostly_sends.compute_s
    await ran(service, 1.001 * mostly_sends.send_s, **wide)
    assert (await planned(service)).calibration.flops_per_s == default
    quick_s = 0.5 * mostly_sends.compute_s  # so it computed at least twice as fast
    await ran(service, quick_s, **wide)
    assert (await planned(service)).calibration.flops_per_s == pytest.approx(2 * default)


async def test_a_much_smaller_job_says_how_fast_it_computed_at_least(service: Service) -> None:
    """Its steps consist mostly of launch overhead, which on a GPU is hundreds of times longer."""
    default = (await planned(service)).calibration.flops_per_s
    small = {"model": {"width": 16, "num_layers": 1, "num_heads": 1}}
    await ran(service, 1.0, **small)
    assert (await planned(service)).calibration.flops_per_s == default
    assert (await planned(service, **small)).calibration.flops_per_s < default / 100
    await ran(service, 1e-9, **small)
    assert (await planned(service)).calibration.flops_per_s > default


async def test_what_only_the_data_could_tell_has_no_plan(service: Service) -> None:
    images = {"recipe": "image_classification", "data": {"source": "file:///folder"}}
    with pytest.raises(NotPlannable, match="image_size"):
        await plans_of(service).plan(PlanRequest.model_validate(images))


async def test_auto_becomes_axes_that_every_attempt_uses(service: Service) -> None:
    needed = memory_of(
        JobSpec.model_validate(text()), shapes_of(JobSpec.model_validate(text()))
    ).total
    resources = {"num_workers": 2, "memory_bytes": needed - 1}  # replicas do not fit
    spec = JobSpec.model_validate(text(parallel="auto", resources=resources))
    job, _ = await service.jobs.submit(spec)
    stored = JobSpec.model_validate(job.spec)
    assert not stored.parallel.auto
    assert stored.parallel.num_parts == 2
    (event,) = (await service.queries.events(job.id)).items
    assert "parallel: auto became" in event.message
    assert event.data["planned"] == job.spec["parallel"]


async def test_auto_without_a_plan_is_data_alone(service: Service) -> None:
    images = {
        "recipe": "image_classification",
        "data": {"source": "file:///folder"},
        "parallel": "auto",
    }
    job, _ = await service.jobs.submit(JobSpec.model_validate(images))
    assert JobSpec.model_validate(job.spec).parallel.num_parts == 1


async def test_a_job_that_cannot_fit_is_refused_with_what_is_missing(service: Service) -> None:
    see_cluster(service, CPU=16.0, GPU=8.0, **{"accelerator_type:H100": 1.0})
    resources = {"num_workers": 2, "gpus_per_worker": 1}
    spec = JobSpec.model_validate(text(model=LARGE, resources=resources))
    with pytest.raises(OutOfMemory) as caught:
        await service.jobs.submit(spec)
    missing = memory_of(spec, shapes_of(spec)).total - 78 * GIB
    assert f"({missing} bytes) are missing" in caught.value.message
    assert caught.value.code == "out_of_memory"
    assert caught.value.hint
    assert (await service.jobs.list()).items == []


async def test_of_a_type_in_two_sizes_the_smaller_is_planned_for_and_the_larger_refused_by(
    service: Service,
) -> None:
    see_cluster(service, CPU=16.0, GPU=8.0, **{"accelerator_type:A100": 1.0})
    resources = {"num_workers": 8, "gpus_per_worker": 1}
    between = LARGE | {"num_layers": 40, "num_heads": 32, "width": 2560}  # 3.1e9 weights
    spec = JobSpec.model_validate(text(8, model=between, resources=resources))
    needed = memory_of(spec, shapes_of(spec)).total
    assert 1.15 * 38 * GIB < needed < 78 * GIB
    plan = await planned(service, model=between, resources=resources)
    assert plan.memory_bytes_per_rank == 38 * GIB
    assert plan.chosen != "data 8"
    await service.jobs.submit(spec)
    larger = text(8, model=between | {"num_layers": 70}, resources=resources)
    with pytest.raises(OutOfMemory, match=r"has 78\.0 GiB \(a GPU of type A100") as caught:
        await service.jobs.submit(JobSpec.model_validate(larger))
    hint = (caught.value.hint or "").removeprefix("it fits with parallel.shard ")
    fits = JobSpec.model_validate(larger | {"parallel": {"shard": int(hint)}})
    assert 38 * GIB < memory_of(fits, shapes_of(fits)).total <= 78 * GIB


async def test_a_size_that_somebody_has_given_a_node_counts(service: Service) -> None:
    see_cluster(
        service,
        CPU=16.0,
        GPU=8.0,
        **{"accelerator_type:A100": 1.0, "accelerator_type:A100-80G": 1.0},
    )
    plan = await planned(service, resources={"num_workers": 2, "gpus_per_worker": 1})
    assert plan.memory_bytes_per_rank == 78 * GIB


async def test_where_nobody_knows_the_memory_nothing_is_refused(service: Service) -> None:
    see_cluster(service, CPU=16.0, GPU=8.0, **{"accelerator_type:UNHEARD-OF": 1.0})
    resources = {"num_workers": 2, "gpus_per_worker": 1}
    await service.jobs.submit(JobSpec.model_validate(text(model=LARGE, resources=resources)))


async def test_what_was_assumed_is_no_reason_to_refuse(service: Service) -> None:
    model = LARGE | {"tokenizer": "file:///tokenizer.json"}
    resources = {"num_workers": 1, "memory_bytes": 1 << 20}
    await service.jobs.submit(JobSpec.model_validate(text(model=model, resources=resources)))


@pytest.mark.parametrize(
    "how",
    [
        {"federated": {"clients": 20, "clients_per_round": 5, "rounds": 30}},
        {"sync": {"kind": "parameter_server"}},
    ],
    ids=str,
)
async def test_jobs_of_these_kinds_are_neither_planned_nor_refused_for_their_memory(
    how: dict[str, Any], service: Service
) -> None:
    document = text(train={}, resources={"num_workers": 3, "memory_bytes": 1000}, **how)
    plans = plans_of(service)
    with pytest.raises(NotPlannable, match=f"`{next(iter(how))}` to plan"):
        await plans.plan(PlanRequest.model_validate(document))
    resolved = await plans.resolve(JobSpec.model_validate(document))
    assert resolved.refusal is None


async def spread(service: Service, seconds: dict[int, float]) -> str:
    """Run a job that succeeds. seconds: the compute time of each rank."""
    resources = {"num_workers": len(seconds)}
    job_id = await service.running(**text(sync={}, resources=resources))
    steps = (
        metrics(step, {COMPUTE_TIME: each}, rank=rank)
        for rank, each in seconds.items()
        for step in range(1, 13)
    )
    service.report(job_id, 1, [resumed(0), *steps])
    service.end(job_id, 1)
    return job_id


async def submitted(service: Service, **parts: Any) -> views.Job:
    job, _ = await service.jobs.submit(JobSpec.model_validate(text(4, **{"sync": "auto"} | parts)))
    return job


async def test_sync_auto_is_all_reduce_and_says_why_not_the_others(service: Service) -> None:
    job = await submitted(service)
    assert job.spec["sync"]["kind"] == "all_reduce"
    (event,) = (await service.queries.events(job.id)).items
    assert "sync: auto became all-reduce: takes" in event.message
    explained = (await service.queries.explain(job.id)).sync
    assert explained is not None
    assert explained.model_dump(mode="json") == event.data["sync_plan"]
    assert explained.options[0].name == explained.chosen == "all-reduce"
    assert len(explained.options) == 8
    assert any("are assumed to be equally fast" in fact for fact in explained.facts)
    plain = await service.submit(**text())
    assert (await service.queries.explain(plain)).sync is None


async def test_a_rank_that_was_slow_in_earlier_jobs_is_a_reason(service: Service) -> None:
    await spread(service, {0: 0.01, 1: 0.1, 2: 0.01, 3: 0.01})
    slow = await spread(service, {0: 0.01, 1: 0.08, 2: 0.01, 3: 0.01})
    job = await submitted(service)
    assert (job.spec["sync"]["kind"], job.spec["sync"]["mode"]) == ("gossip", "ad_psgd")
    (event,) = (await service.queries.events(job.id)).items
    assert f"takes 8.0 times as long as the median rank, as measured in {slow}" in event.message
    assert (await submitted(service, elastic={"min_workers": 1})).spec["sync"]["kind"] == (
        "all_reduce"
    )
    await spread(service, {0: 0.01, 1: 0.01, 2: 0.01, 3: 0.01})
    assert (await submitted(service)).spec["sync"]["kind"] == "all_reduce", "it was slow once"


async def test_what_a_tiny_model_sends_is_little_beside_the_calls_of_a_step(
    service: Service,
) -> None:
    wine = {"recipe": "tabular_classification", "data": {"source": "sklearn://wine"}}
    for bandwidth, kind in (("100MiB", "all-reduce"), ("10KiB", "local steps, every 32")):
        sync = {"kind": "auto", "bandwidth_bytes_per_s": bandwidth}
        document = {**wine, "sync": sync, "resources": {"num_workers": 4}}
        found = await service.jobs.dry_run(JobSpec.model_validate(document))
        assert found.sync is not None
        assert found.sync.chosen == kind


async def test_a_plan_has_what_sync_auto_would_take(service: Service) -> None:
    given = {"bandwidth_bytes_per_s": 1e5}
    plan = await plans_of(service).plan(PlanRequest.model_validate(text(4) | given))
    name = plan.sync.chosen
    if plan.chosen == "data 4":
        assert name.startswith("local steps")
    else:  # the ranks share a model
        assert name == "all-reduce"
        assert "the model is divided among the ranks" in plan.sync.options[0].why
    noise = {"train": {"global_batch_size": 16, "measure_noise": True}}
    plan = await plans_of(service).plan(PlanRequest.model_validate(text(4, **noise)))
    assert plan.sync.chosen == "all-reduce", "also of a document that takes no sync"
    wide = {"bandwidth_bytes_per_s": 1e12}
    plan = await plans_of(service).plan(PlanRequest.model_validate(text(4) | wide))
    assert plan.sync.chosen == "all-reduce"


async def test_nodes_and_their_labels_are_known(service: Service) -> None:
    see_cluster(service, CPU=2.0)
    job = await submitted(service, resources={"num_workers": 2})
    explained = (await service.queries.explain(job.id)).sync
    assert explained is not None
    assert "all workers (2) run on 1 node" in explained.facts


async def test_of_a_dry_run_the_choice_is_told(service: Service) -> None:
    found = await service.jobs.dry_run(JobSpec.model_validate(text(4, sync="auto")))
    assert found.sync is not None
    assert found.sync.chosen == "all-reduce"
    unknown = text(2, sync="auto", recipe="image_classification", data={"source": "file:///f"})
    unknown.pop("model", None)
    found = await service.jobs.dry_run(JobSpec.model_validate(unknown))
    assert found.sync is not None
    assert "image_size" in found.sync.options[0].why
