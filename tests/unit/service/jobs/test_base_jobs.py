"""Jobs whose base model is the result of another job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ray_workers.shared.contracts import Cause
from service.config.models_file import ModelsFile
from service.domain.errors import CheckpointInUse, InvalidDocument, LicenceNotAccepted
from tests.marks import RULES
from tests.unit.service.helpers import SHA, Service

pytestmark = RULES

FILES = ("config.json", "model.safetensors", "tokenizer.json", "adapter/adapter_config.json")


def tuning(base: str, *, accepts: Any = False, **fields: Any) -> dict[str, Any]:
    return {
        "recipe": "fine_tuning",
        "model": {"base": base, "accept_licence": accepts},
        "data": {"source": "file:///a.jsonl"},
        "checkpoint": {},
        **fields,
    }


async def tuned(service: Service, *names: str, cause: Cause = Cause.SUCCEEDED) -> str:
    """Return a job that has ended, with these artifacts."""
    job_id = await service.running(**tuning("file:///base"))
    service.end(job_id, 1, cause, frames=[service.artifact(job_id, 1, name) for name in names])
    return job_id


async def refusal(service: Service, job_id: str) -> str:
    with pytest.raises(InvalidDocument) as caught:
        await service.submit(**tuning(f"job://{job_id}"))
    assert caught.value.pointer == "/model/base"
    return caught.value.message


async def test_an_attempt_receives_the_files_of_the_other_job(service: Service) -> None:
    first = await tuned(service, *FILES)
    claimed = service.claim(await service.submit(**tuning(f"job://{first}")))
    assert claimed is not None
    found = {one.name: (one.url, one.sha256) for one in claimed.data_policy.result}
    assert found == {name: (service.url(first, 1, f"artifacts/{name}"), SHA) for name in FILES}
    other = service.claim(await service.submit(**tuning("file:///base")))
    assert other is not None
    assert other.data_policy.result == ()


async def test_a_result_that_can_be_no_base_is_refused(service: Service) -> None:
    assert "job-none does not exist" in await refusal(service, "job-none")
    running = await service.running(**tuning("file:///base"))
    assert "is RUNNING: a job can be a base only after" in await refusal(service, running)
    failed = await tuned(service, cause=Cause.BAD_DATA)
    assert "is FAILED" in await refusal(service, failed)
    adapter = await tuned(service, "adapter/adapter_config.json", "tokenizer.json")
    found = await refusal(service, adapter)
    assert "has no config.json" in found
    assert "unless model.adapter.merge is false" in found
    deleted = await tuned(service, *FILES)
    await service.jobs.delete(deleted)
    assert "does not exist" in await refusal(service, deleted)


async def test_a_licence_applies_to_results_of_fine_tuning(
    service: Service, tmp_path: Path
) -> None:
    """Also to results of results, when the first job has been deleted."""
    path = tmp_path / "models.yaml"
    guarded = {"name": "guarded", "base": "file:///base", "licence": "CL", "must_accept": True}
    free = {"name": "free", "base": "file:///free", "licence": "MIT"}
    path.write_text(json.dumps({"models": [free, guarded]}))
    service.jobs.models = ModelsFile(path)

    async def tuned_from(base: str) -> str:
        job_id = await service.running(**tuning(base, accepts="CL"))
        service.end(job_id, 1, frames=[service.artifact(job_id, 1, name) for name in FILES])
        return job_id

    first = await tuned_from("guarded")
    for _ in range(2):
        with pytest.raises(LicenceNotAccepted, match="are a result of fine-tuning this model"):
            await service.submit(**tuning(f"job://{first}"))
        with pytest.raises(LicenceNotAccepted):
            await service.submit(**tuning("file:///other", init_from={"job": first}))
        for base in ("free", "file:///free"):  # a model that requires no licence itself
            with pytest.raises(LicenceNotAccepted, match="model 'guarded' requires"):
                await service.submit(**tuning(base, init_from={"job": first}))
        second = await tuned_from(f"job://{first}")
        model = (await service.jobs.get(second)).spec["model"]
        assert (model["base"], model["accept_licence"]) == (f"job://{first}", "CL")
        (event, *_) = (await service.queries.events(second)).items
        assert event.data["accepted"] == {"model": f"job://{first}", "licence": "CL"}
        await service.jobs.delete(first)
        first = second


async def test_two_licences_are_both_asked_for_and_recorded(
    service: Service, tmp_path: Path
) -> None:
    """Of the base, and of the model whose result the weights are; also for results of both."""
    path = tmp_path / "models.yaml"
    models = [
        {"name": name, "base": f"file:///{name}", "licence": licence, "must_accept": True}
        for name, licence in (("llama", "LL"), ("gemma", "GT"))
    ]
    path.write_text(json.dumps({"models": models}))
    service.jobs.models = ModelsFile(path)

    async def done(base: str, accepts: Any, **fields: Any) -> str:
        job_id = await service.running(**tuning(base, accepts=accepts, **fields))
        ref = service.checkpoint(job_id, 1, 5)
        service.end(job_id, 1, frames=[service.artifact(job_id, 1, name) for name in FILES] + [ref])
        return job_id

    first = await done("llama", "LL")
    of_both = tuning("gemma", init_from={"job": first})
    with pytest.raises(LicenceNotAccepted) as refused:
        await service.submit(**of_both)
    assert "'gemma' requires that you accept its licence, 'GT'; the model 'llama' requires" in (
        refused.value.message
    )
    assert "'LL', which also applies here because" in refused.value.message
    assert "`dray model bases gemma` and `dray model bases llama`" in str(refused.value.hint)
    for accepts, missing in (("GT", "llama"), ("LL", "gemma"), (["MIT", "LL"], "gemma")):
        with pytest.raises(LicenceNotAccepted, match=f"but the model '{missing}' has") as refused:
            await service.submit(**tuning("gemma", init_from={"job": first}, accepts=accepts))
        assert 'set model.accept_licence to ["GT", "LL"]' in str(refused.value.hint)
    for accepts in (True, ["LL", "GT"]):
        second = await done("gemma", accepts, init_from={"job": first})
        model = (await service.jobs.get(second)).spec["model"]
        assert (model["catalogue"], model["accept_licence"]) == ("gemma", ["GT", "LL"])
        (event, *_) = (await service.queries.events(second)).items
        assert event.data["accepted"] == {"model": "gemma", "licence": ["GT", "LL"]}
        assert "accepted the licence 'GT' and 'LL' of gemma" in event.message
    with pytest.raises(LicenceNotAccepted, match=r"'GT', which also.*'LL', which also"):
        await service.submit(**tuning(f"job://{second}"))
    with pytest.raises(LicenceNotAccepted, match="the model 'llama' has the licence 'LL'"):
        await service.submit(**tuning(f"job://{second}", accepts="GT"))
    assert await service.submit(**tuning(f"job://{second}", accepts=["GT", "LL"]))


async def test_a_licence_applies_to_results_from_before_the_catalogue(
    service: Service, tmp_path: Path
) -> None:
    first = await tuned(service, *FILES)
    await service.submit(**tuning(f"job://{first}"))
    path = tmp_path / "models.yaml"
    guarded = {"name": "guarded", "base": "file:///base", "licence": "CL", "must_accept": True}
    path.write_text(json.dumps({"models": [guarded]}))
    service.jobs.models = ModelsFile(path)
    with pytest.raises(LicenceNotAccepted, match="are a result of fine-tuning this model"):
        await service.submit(**tuning(f"job://{first}"))


async def test_a_base_is_not_deleted_while_a_job_needs_it(service: Service) -> None:
    first = await tuned(service, *FILES)
    job_id = await service.submit(**tuning(f"job://{first}"))
    with pytest.raises(CheckpointInUse, match=f"{job_id} needs a checkpoint or the result of"):
        await service.jobs.delete(first)
    await service.jobs.cancel(job_id)
    await service.jobs.delete(first)
