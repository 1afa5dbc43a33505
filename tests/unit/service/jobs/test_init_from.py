"""Jobs that start from another job's checkpoint: choosing and deleting the checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy.orm import Session

from dray.train.checkpoints import CheckpointRef
from dray.views import JobState
from ray_workers.shared.contracts import Frame, FrameKind
from service.db.repositories import jobs as repository
from service.domain.errors import CheckpointInUse, InitFromDiffers, InitFromNotFound
from tests.marks import RULES
from tests.unit.service.helpers import SHA, Service, frame, spec

pytestmark = RULES


async def source(service: Service, *steps: int, **fields: Any) -> str:
    """Return a running job with checkpoints whose accuracy decreases with each step."""
    fields.setdefault("checkpoint", {"best": "val/accuracy"})
    job_id = await service.running(**fields)
    frames = [service.checkpoint(job_id, 1, step, val_accuracy=1 / (1 + step)) for step in steps]
    service.report(job_id, 1, frames)
    return job_id


def dropped(service: Service, job_id: str, step: int) -> Frame:
    url = service.url(job_id, 1, f"checkpoints/step-{step}")
    return frame(FrameKind.CHECKPOINT_DROPPED, {"step": step, "url": url})


def ref(service: Service, job_id: str, step: int) -> CheckpointRef:
    return CheckpointRef(service.url(job_id, 1, f"checkpoints/step-{step}"), step, SHA)


@pytest.mark.parametrize(("asked", "step"), [("latest", 30), ("best", 10), (20, 20)])
async def test_an_attempt_begins_with_the_checkpoint_that_was_meant_at_submit(
    service: Service, asked: str | int, step: int
) -> None:
    first = await source(service, 10, 20, 30)
    job_id = await service.submit(init_from={"job": first, "step": asked})
    service.report(first, 1, [service.checkpoint(first, 1, 40, val_accuracy=0.99)])
    claimed = service.claim(job_id)
    assert claimed is not None
    assert claimed.init_from == ref(service, first, step)
    assert claimed.resume_from == ()
    older = [ref(service, first, each) for each in (30, 20, 10) if each < step]
    assert list(claimed.older_than_init_from) == older, "an error can name these"


async def test_a_job_without_init_from_begins_with_nothing(service: Service) -> None:
    claimed = service.claim(await service.submit())
    assert claimed is not None
    assert claimed.init_from is None


@pytest.mark.parametrize(
    ("asked", "pointer", "says"),
    [
        (
            {"job": "job-none"},
            "/init_from/job",
            "the job job-none, from which this job should start, does not exist",
        ),
        ({"step": 99}, "/init_from/step", "has no checkpoint at step 99"),
    ],
)
async def test_what_is_not_there_is_refused_with_the_field_at_fault(
    service: Service, asked: dict[str, Any], pointer: str, says: str
) -> None:
    first = await source(service, 10)
    with pytest.raises(InitFromNotFound, match=says) as caught:
        await service.submit(init_from={"job": first, **asked})
    assert caught.value.pointer == pointer
    assert [job.id for job in (await service.jobs.list()).items] == [first]


async def test_no_checkpoint_and_no_best_one_are_told_apart(service: Service) -> None:
    empty = await source(service)
    with pytest.raises(InitFromNotFound, match="has no checkpoint"):
        await service.submit(init_from={"job": empty})
    unnamed = await source(service, 5, checkpoint={})
    with pytest.raises(InitFromNotFound, match="names no metric") as caught:
        await service.submit(init_from={"job": unnamed, "step": "best"})
    assert "steps 5" in str(caught.value.hint)
    other = await source(service, 5, checkpoint={"best": "val/loss"})
    with pytest.raises(InitFromNotFound, match="none was measured by val/loss"):
        await service.submit(init_from={"job": other, "step": "best"})


async def test_a_job_that_is_being_deleted_is_not_there(service: Service) -> None:
    first = await source(service, 10)
    service.end(first, 1)
    await service.jobs.delete(first)
    with pytest.raises(InitFromNotFound, match="from which this job should start, does not exist"):
        await service.submit(init_from={"job": first})


async def test_what_a_live_job_starts_from_can_not_be_deleted(service: Service) -> None:
    first = await source(service, 10)
    service.end(first, 1)
    job_id = await service.submit(init_from={"job": first})
    with pytest.raises(CheckpointInUse, match=job_id) as caught:
        await service.jobs.delete(first)
    assert "cancel it" in str(caught.value.hint)
    assert (await service.jobs.get(first)).state is JobState.SUCCEEDED
    await service.jobs.cancel(job_id)
    await service.jobs.delete(first)


async def test_the_newest_stands_in_for_one_that_its_own_job_dropped(service: Service) -> None:
    first = await source(service, 10, 20)
    latest = await service.submit(init_from={"job": first, "step": "latest"})
    named = await service.submit(init_from={"job": first, "step": 20})
    service.report(first, 1, [service.checkpoint(first, 1, 30), dropped(service, first, 20)])
    for job_id, step in ((latest, 30), (named, 20)):
        claimed = service.claim(job_id)
        assert claimed is not None
        assert claimed.init_from == ref(service, first, step)


async def test_all_that_it_holds_goes_only_to_training_of_its_kind(service: Service) -> None:
    first = await source(service, 10)
    whole = {"job": first, "take": "everything"}
    with pytest.raises(InitFromDiffers, match=f"full state of {first}: /train/seed is 1") as caught:
        await service.submit(init_from=whole, train={"seed": 1})
    assert caught.value.pointer == "/train/seed"
    assert [job.id for job in (await service.jobs.list()).items] == [first]
    await service.submit(init_from={"job": first}, train={"seed": 1})
    divided = {"resources": {"num_workers": 2}, "parallel": {"shard": 2}}
    claimed = service.claim(
        await service.submit(init_from=whole, checkpoint={"every_steps": 5}, **divided), workers=2
    )
    assert claimed is not None
    assert claimed.init_from == ref(service, first, 10)


async def test_weights_of_another_width_are_refused_and_nothing_is_stored(
    service: Service,
) -> None:
    first = await source(service, 10)
    for take in ("weights", "everything"):
        asked = {"job": first, "take": take}
        with pytest.raises(InitFromDiffers, match="/model/width is 64, but was 32: the") as caught:
            await service.submit(init_from=asked, model={"name": "cnn", "width": 64})
        assert caught.value.pointer == "/model/width"
        assert f"can't start from the weights of {first}" in caught.value.message
    assert [job.id for job in (await service.jobs.list()).items] == [first]


GPT = {"num_layers": 2, "num_heads": 2, "width": 8}
TEXT: dict[str, Any] = {"recipe": "language_model", "data": {"source": "file:///text.txt"}}


async def test_a_mesh_that_the_model_of_the_checkpoint_can_not_take_is_refused(
    service: Service,
) -> None:
    first = await source(service, 10, model=GPT, **TEXT)
    wanted: dict[str, Any] = {
        **TEXT,
        "init_from": {"job": first},
        "resources": {"num_workers": 4},
    }
    with pytest.raises(ValidationError, match=r"model\.num_heads"):
        await service.submit(**wanted, model=GPT, parallel={"tensor": 4})
    with pytest.raises(InitFromDiffers, match="/model/num_heads is 4, but was 2") as caught:
        await service.submit(**wanted, model={**GPT, "num_heads": 4}, parallel={"tensor": 4})
    assert caught.value.pointer == "/model/num_heads"
    assert [job.id for job in (await service.jobs.list()).items] == [first]
    await service.submit(**wanted, model=GPT, parallel={"tensor": 2, "shard": 2})


async def test_of_a_document_that_is_no_longer_read_only_the_weights_are_taken(
    service: Service,
) -> None:
    first = await source(service, 10)

    def age(session: Session) -> None:
        row = repository.get(session, first)
        assert row is not None
        row.spec = {**row.spec, "of_another_age": True}

    service.database.write_sync(age)
    with pytest.raises(InitFromDiffers, match=f"can't read the document of {first}") as caught:
        await service.submit(init_from={"job": first, "take": "everything"})
    assert caught.value.pointer == "/init_from/take"
    await service.submit(init_from={"job": first})


async def test_many_users_are_counted_in_the_sentence(service: Service) -> None:
    first = await source(service, 10)
    service.end(first, 1)
    for _ in range(5):
        await service.jobs.submit(spec(init_from={"job": first}))
    with pytest.raises(CheckpointInUse, match="and 2 more need a checkpoint or the result of"):
        await service.jobs.delete(first)
