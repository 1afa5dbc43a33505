"""Replicas that differ: from which checkpoint the job resumes, and which nodes are withheld."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dray.drills import DrillKind
from dray.requests import DrillRequest
from dray.views import Event, JobState
from ray_workers.shared.contracts import Cause, Frame, FrameKind
from service.cluster.port import ClusterSnapshot
from service.domain.errors import (
    CheckpointNotFound,
    DrillImpossible,
    InitFromNotFound,
    NothingWithheld,
)
from service.nodes import node_table, withheld
from service.nodes.withheld import WithheldNodes
from tests.unit.service.helpers import Service, frame
from tests.wire import cluster_node

CHECKED = {"check": {"replicas_every": 10}, "resources": {"num_workers": 3}}
SNAPSHOT = ClusterSnapshot(
    "session-1",
    "ray://x",
    None,
    False,
    (cluster_node("node-a", {"CPU": 4.0}, hostname="big.lan", available={"CPU": 4.0}),),
)


def see(service: Service) -> None:
    service.database.write_sync(lambda s: node_table.store(s, SNAPSHOT, None, service.now))


def compared(step: int, *culprits: int, differing: int = 0, is_drill: bool = False) -> Frame:
    named = [{"rank": rank, "hostname": "big.lan", "device": "cpu"} for rank in culprits]
    body = {
        "step": step,
        "num_differing": differing or len(culprits),
        "culprits": named,
        "is_drill": is_drill,
    }
    return frame(FrameKind.REPLICAS, body)


async def events_of(service: Service, job_id: str, type_: str) -> list[Event]:
    return [one for one in (await service.queries.events(job_id)).items if one.type == type_]


async def running(service: Service, **fields: Any) -> str:
    see(service)
    return await service.running(**{**CHECKED, **fields})


async def withheld_reasons(service: Service) -> list[str]:
    see(service)
    (node,) = (await service.queries.cluster()).nodes
    return [one.reason for one in node.withheld]


async def test_the_job_returns_to_the_last_checkpoint_with_equal_replicas(
    service: Service,
) -> None:
    job_id = await running(service, max_retries=0)
    saved = [service.checkpoint(job_id, 1, step) for step in (8, 10, 12)]
    service.report(job_id, 1, [*saved, compared(10)])
    service.end(job_id, 1, Cause.CORRUPTED, "differ", [compared(20, 1)])
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.QUEUED, "corrupted")
    assert (await service.queries.events(job_id)).items[-1].data["charged_to"] == "infra"
    claimed = service.claim(job_id, 1)
    assert claimed is not None
    assert [ref.step for ref in claimed.resume_from] == [10, 8]
    (event,) = await events_of(service, job_id, "replicas_differ")
    assert "rank 1 on big.lan (cpu)" in event.message
    assert "last equal after step 10" in event.message
    assert event.data["withheld"] == ["big.lan"]


async def test_a_checkpoint_that_might_contain_a_difference_is_used_for_nothing(
    service: Service,
) -> None:
    """The best checkpoint is one of them."""
    best = {"checkpoint": {"best": "val/accuracy"}}
    job_id = await running(service, max_retries=0, **best)
    saved = [service.checkpoint(job_id, 1, step, val_accuracy=step / 100) for step in (8, 10, 12)]
    service.report(job_id, 1, [*saved, compared(10), compared(20, 1)])
    listed = (await service.queries.checkpoints(job_id)).items
    found = [(one.step, one.is_latest, one.is_best) for one in listed]
    assert found == [(10, True, True), (8, False, False)]
    with pytest.raises(CheckpointNotFound, match="replicas of the model were known to be equal"):
        await service.queries.checkpoint_files(job_id, 12)
    with pytest.raises(InitFromNotFound, match="replicas of the model were known to be equal"):
        await service.submit(init_from={"job": job_id, "step": 12})
    for wanted in ("latest", "best"):
        other = await service.submit(init_from={"job": job_id, "step": wanted})
        claimed = service.claim(other)
        assert claimed is not None
        assert claimed.init_from is not None
        assert claimed.init_from.step == 10


async def test_a_job_that_waits_for_a_checkpoint_gets_an_older_one_if_the_replicas_differed(
    service: Service,
) -> None:
    job_id = await running(service, max_retries=0)
    saved = [service.checkpoint(job_id, 1, step) for step in (8, 12)]
    service.report(job_id, 1, [*saved, compared(10)])
    other = await service.submit(init_from={"job": job_id})
    service.report(job_id, 1, [compared(20, differing=1)])
    claimed = service.claim(other)
    assert claimed is not None
    assert claimed.init_from is not None
    assert claimed.init_from.step == 8


@pytest.mark.parametrize(
    ("device", "code"), [("cpu", "replicas_differ_on_cpu"), ("cuda:0 GPU-1", "replicas_differ")]
)
async def test_the_withheld_resources_depend_on_the_device(
    service: Service, device: str, code: str
) -> None:
    job_id = await running(service)
    report = compared(20, 1, 2)
    for culprit in report.body["culprits"]:
        culprit["device"] = device
    service.end(job_id, 1, Cause.CORRUPTED, "differ", [report])
    ((row,),) = service.database.read_sync(withheld.by_hostname).values()
    assert row.code == code
    assert f"the replicas of rank 1 ({device}), rank 2 ({device}) differed" in row.reason
    (event,) = await events_of(service, job_id, "replicas_differ")
    assert event.data["withheld"] == ["big.lan"]


async def test_random_attempts_never_resume_from_a_checkpoint_after_the_last_agreement(
    service: Service,
) -> None:
    """The oracle lists the checkpoints of one attempt that are not newer than its last
    agreement."""
    see(service)
    for seed in range(12):
        draw = random.Random(f"resume {seed}")
        job_id = await service.running(**CHECKED)
        checks = sorted(draw.sample(range(1, 40), draw.randint(0, 4)))
        saves = sorted(draw.sample(range(1, 40), draw.randint(0, 6)))
        frames = [compared(step) for step in checks]
        frames += [service.checkpoint(job_id, 1, step) for step in saves]
        draw.shuffle(frames)
        is_corrupt = draw.random() < 0.7
        last = [compared(50, differing=1)] if is_corrupt else []
        service.report(job_id, 1, frames)
        cause = Cause.CORRUPTED if is_corrupt else Cause.WORKER_LOST
        service.end(job_id, 1, cause, "it ended", last)
        claimed = service.claim(job_id, 1)
        assert claimed is not None
        limit = (checks[-1] if checks else 0) if is_corrupt else 100
        expected = [step for step in reversed(saves) if step <= limit]
        assert [ref.step for ref in claimed.resume_from] == expected


async def test_the_culprits_node_is_withheld_until_an_admin_releases_it(service: Service) -> None:
    job_id = await running(service)
    service.end(job_id, 1, Cause.CORRUPTED, "differ", [compared(20, 1)])
    (reason,) = await withheld_reasons(service)
    why = "the replica of rank 1 (cpu) differed from the majority"
    assert reason == f"after step 20 of {job_id}, {why}"
    nodes = WithheldNodes(service.database)
    for other in ("other.lan", "a\0b"):
        with pytest.raises(NothingWithheld):
            await nodes.release(other)
    await nodes.release("big.lan")
    assert await withheld_reasons(service) == []


async def test_a_host_on_which_the_attempt_has_no_slots_is_not_withheld(service: Service) -> None:
    job_id = await running(service)
    report = compared(20, 1)
    report.body["culprits"][0]["hostname"] = "other.lan"
    service.end(job_id, 1, Cause.CORRUPTED, "differ", [report])
    assert not service.database.read_sync(withheld.by_hostname)
    (event,) = await events_of(service, job_id, "replicas_differ")
    assert event.data["withheld"] == []


@pytest.mark.parametrize(
    "report", [compared(20, differing=1), compared(20, 1, is_drill=True)], ids=["tie", "drill"]
)
async def test_without_a_faulty_rank_nothing_is_withheld(service: Service, report: Frame) -> None:
    job_id = await running(service)
    service.end(job_id, 1, Cause.CORRUPTED, "differ", [report])
    assert await withheld_reasons(service) == []
    assert len(await events_of(service, job_id, "replicas_differ")) == 1


async def test_corruption_that_repeats_uses_up_the_retries_for_faults(service: Service) -> None:
    job_id = await running(service, max_retries=0)
    for attempt in range(1, 50):
        service.end(job_id, attempt, Cause.CORRUPTED, "differ", [compared(5, differing=1)])
        service.advance(100.0)
        if (await service.jobs.get(job_id)).state is JobState.FAILED:
            break
        assert service.claim(job_id, attempt) is not None
    job = await service.jobs.get(job_id)
    assert (job.state, job.reason.code) == (JobState.FAILED, "corrupted")
    assert attempt > 1


async def test_a_drill_needs_a_job_that_compares_its_replicas(service: Service) -> None:
    request = DrillRequest(kind=DrillKind.CORRUPT)
    job_id = await service.running()
    with pytest.raises(DrillImpossible, match="does not compare its replicas"):
        await service.faults.drill(job_id, request)
    see(service)
    job_id = await service.submit(**CHECKED)
    assert service.claim(job_id, workers=3) is not None
    service.report(job_id, 1)
    drill = await service.faults.drill(job_id, request)
    reported = {"id": drill.id, "state": "struck", "step": 3}
    service.report(job_id, 1, [frame(FrameKind.DRILL, reported, rank=-1)])
    service.end(job_id, 1, Cause.CORRUPTED, "differ", [compared(20, 0, is_drill=True)])
    assert (await service.queries.events(job_id)).items[-1].data["charged_to"] == "free"
