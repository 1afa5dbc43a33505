"""Registered models on each database: numbers, aliases, owners, and what is kept."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from itertools import pairwise
from typing import Any

import pytest

from dray.input import model_names
from dray.model_requests import AliasRequest, RegistrationRequest
from ray_workers.shared.contracts import Cause, Frame
from ray_workers.shared.names import attempt_prefix
from service.db.repositories import storage as storage_repository
from service.domain.callers import Caller
from service.domain.errors import (
    AliasMoved,
    CheckpointInUse,
    InvalidDocument,
    ModelNotFound,
    ModelOfAnother,
    ModelVersionNotFound,
    NotFound,
    VersionInUse,
)
from service.tracking.registry import MAX_ALIASES, Registry
from tests.seeds import drawn
from tests.unit.service.helpers import Service

ANN, BOB, ROOT = Caller("ann", False), Caller("bob", False), Caller("root", True)


@pytest.fixture
def registry(service: Service) -> Registry:
    return Registry(service.database, service.storage)


async def done(
    service: Service,
    *steps: int,
    result: tuple[str, ...] = ("model.bin",),
    cause: Cause = Cause.SUCCEEDED,
    **fields: Any,
) -> str:
    """Return a job that has ended, with checkpoints at these steps and these result files."""
    job_id = await service.running(**fields)
    for path in result:
        service.storage.write_bytes(f"{attempt_prefix(job_id, 1)}/artifacts/{path}", b"abc")
    frames = [checkpoint(service, job_id, step) for step in steps]
    frames += [service.artifact(job_id, 1, path) for path in result]
    service.end(job_id, 1, cause, frames=frames)
    return job_id


def checkpoint(service: Service, job_id: str, step: int) -> Frame:
    """Write a checkpoint without files, and return its report."""
    key = f"{attempt_prefix(job_id, 1)}/checkpoints/step-{step}"
    manifest = json.dumps({"step": step, "files": [], "metrics": {}}).encode()
    service.storage.write_bytes(f"{key}/manifest.json", manifest)
    report = service.checkpoint(job_id, 1, step)
    found = {"url": service.storage.url_of(key), "manifest_sha256": sha256(manifest).hexdigest()}
    return replace(report, body={**report.body, **found})


async def register(registry: Registry, name: str, job: str, **fields: Any) -> int:
    wanted = RegistrationRequest.model_validate({"name": name, "job": job, **fields})
    return (await registry.register(wanted, ANN))[0].version


async def test_only_the_owner_and_admins_change_a_model(
    service: Service, registry: Registry
) -> None:
    job_id = await done(service)
    other = RegistrationRequest(name="ours", job=await done(service))
    await register(registry, "ours", job_id, aliases=["best"])
    to_one = AliasRequest(version=1)
    refused = [
        registry.register(other, BOB),
        registry.move("ours", "best", to_one, BOB),
        registry.remove_alias("ours", "best", BOB),
        registry.set_card("ours", 1, "mine", BOB),
        registry.delete_version("ours", 1, BOB),
        registry.delete("OURS", BOB),
    ]
    for call in refused:
        with pytest.raises(ModelOfAnother, match="only ann, its owner, and admins"):
            await call
    assert (await registry.model("ours")).aliases == {"best": 1}
    await registry.set_card("ours", "best", "of the admin", ROOT)
    assert (await registry.version("ours", 1)).card == "of the admin"
    await registry.delete("ours", ROOT)
    version, _ = await registry.register(other, BOB)
    assert version.version == 2, "numbers are not used again"
    assert (await registry.model("ours")).owner == "bob"


@pytest.mark.parametrize(
    ("cause", "fields", "pointer", "says"),
    [
        (Cause.BAD_DATA, {}, "/job", "only a job that succeeded has a result"),
        (Cause.SUCCEEDED, {"step": 7}, "/step", "no checkpoint at step 7"),
        (Cause.SUCCEEDED, {"step": "best"}, "/step", "no best checkpoint"),
    ],
)
async def test_what_a_job_lacks_is_not_registered(
    service: Service,
    registry: Registry,
    cause: Cause,
    fields: dict[str, Any],
    pointer: str,
    says: str,
) -> None:
    job_id = await done(service, cause=cause, checkpoint={})
    with pytest.raises(InvalidDocument, match=says) as caught:
        await register(registry, "model", job_id, **fields)
    assert caught.value.pointer == pointer
    with pytest.raises(ModelNotFound):
        await registry.model("model")


async def test_a_job_that_trains_or_whose_files_are_gone_is_not_registered(
    service: Service, registry: Registry
) -> None:
    running = await service.running()
    with pytest.raises(InvalidDocument, match="is RUNNING: it must have ended"):
        await register(registry, "model", running)
    job_id = await done(service)
    service.storage.delete_tree(f"jobs/{job_id}")
    with pytest.raises(InvalidDocument, match=r"no longer has the file 'model\.bin'"):
        await register(registry, "model", job_id)
    with pytest.raises(NotFound):
        await register(registry, "model", "job-none")


async def test_a_version_whose_files_are_lost_says_so(service: Service, registry: Registry) -> None:
    job_id = await done(service)
    await register(registry, "model", job_id)
    found = (await registry.version("model", 1)).files or []
    assert [(one.path, one.missing) for one in found] == [("model.bin", False)]
    service.storage.delete_tree(f"jobs/{job_id}")
    found = (await registry.version("model", 1)).files or []
    assert [(one.path, one.missing) for one in found] == [("model.bin", True)]


async def test_a_version_pins_its_job(service: Service, registry: Registry) -> None:
    pinned = await done(service, array={"size": 1})
    free = await done(service)
    await register(registry, "model", pinned)
    array_id = (await service.jobs.get(pinned)).array_id
    assert array_id is not None
    with pytest.raises(CheckpointInUse, match="model://model@1 is its result"):
        await service.jobs.delete(pinned)
    with pytest.raises(CheckpointInUse):
        await service.jobs.arrays.delete(array_id, actor="ann")
    assert (await service.jobs.get(pinned)).id == pinned
    later = service.now + timedelta(days=1)

    def old() -> list[str]:
        pairs = service.database.read_sync(
            lambda s: storage_repository.finished_before(s, later, 10)
        )
        return [job_id for job_id, _ in pairs]

    assert old() == [free], "the retention deletes the others"
    await registry.delete_version("model", 1, ANN)
    assert set(old()) == {free, pinned}
    await service.jobs.arrays.delete(array_id, actor="ann")


async def test_aliases_move_atomically(service: Service, registry: Registry) -> None:
    for _ in range(9):
        await register(registry, "model", await done(service))

    async def move(version: int, from_version: int) -> bool:
        wanted = AliasRequest(version=version, from_version=from_version)
        try:
            await registry.move("model", "production", wanted, ANN)
        except AliasMoved:
            return False
        return True

    await registry.move("model", "production", AliasRequest(version=1), ANN)
    for was in range(1, 4):
        now = (await registry.model("model")).aliases["production"]
        others = [number for number in range(4, 10) if number != now]
        moved = await asyncio.gather(*(move(number, now) for number in others))
        assert sum(moved) == 1, "two moves from the same version can't both succeed"
        assert await move(now, now) is False, was
    record = (await registry.moves("model")).items
    assert len(record) == 4
    for newer, older in pairwise(record):
        assert newer.from_version == older.to_version


async def test_two_registrations_at_once_get_different_numbers(
    service: Service, registry: Registry
) -> None:
    jobs = [await done(service) for _ in range(6)]
    found = await asyncio.gather(*(register(registry, "Model", each) for each in (*jobs, jobs[0])))
    assert sorted(set(found)) == list(range(1, 7))
    assert found[0] == found[-1], "the same result is registered once"


async def test_names_are_read_without_case_and_in_normal_form(
    service: Service, registry: Registry
) -> None:
    long = "模" * 200
    for name in ("Straße", "e\u0301tude", long, "..x", "it's"):
        await register(registry, name, await done(service))
    assert (await registry.model("STRASSE")).name == "Straße"
    assert (await registry.version("\u00c9TUDE", 1)).reference == "model://\u00e9tude@1"
    assert (await registry.model(long)).num_versions == 1
    for name in ("a b", "a/b", "a@b", "model:x", "a?b", "", "x" * 201, "..", "a\u202eb", "\ud800"):
        with pytest.raises(ValueError, match=r"name"):
            RegistrationRequest.model_validate({"name": name, "job": "job-0"})
        with pytest.raises(ModelNotFound):
            await registry.model(name)


async def test_too_many_aliases_are_refused(service: Service, registry: Registry) -> None:
    await register(registry, "model", await done(service))
    for number in range(MAX_ALIASES):
        await registry.move("model", f"a{number}", AliasRequest(version=1), ANN)
    with pytest.raises(InvalidDocument, match="100 aliases"):
        await registry.move("model", "more", AliasRequest(version=1), ANN)
    await registry.move("model", "a0", AliasRequest(version=1), ANN)


async def test_lineage_leads_to_the_first_ancestor(service: Service, registry: Registry) -> None:
    first = await done(service, 10, 20)
    await register(registry, "model", first, step=10)
    second = await done(service, 5, init_from="model://model@1")
    await register(registry, "model", second)
    third = await done(service, 7, init_from="model://MODEL@2")
    await register(registry, "model", third)
    lineage = (await registry.version("model", 3)).lineage
    assert lineage is not None
    found = [(one.job_id, one.step, one.model) for one in lineage.parents]
    assert found == [(second, 5, "model://model@2"), (first, 10, "model://model@1")]
    await registry.delete("model", ANN)
    await service.jobs.delete(first)
    await register(registry, "other", third)
    lineage = (await registry.version("other", 1)).lineage
    assert lineage is not None
    assert [one.exists for one in lineage.parents] == [True, False]


async def test_a_base_is_the_result_of_a_version(service: Service, registry: Registry) -> None:
    files = ("config.json", "model.safetensors", "tokenizer.json")
    tuning = {"recipe": "fine_tuning", "data": {"source": "file:///a.jsonl"}, "checkpoint": {}}
    first = await done(service, 3, result=files, **tuning, model={"base": "file:///base"})
    await register(registry, "chat", first, aliases=["production"])
    await register(registry, "chat", first, step=3)
    job_id = await service.submit(**tuning, model={"base": "model://chat@production"})
    model = (await service.jobs.get(job_id)).spec["model"]
    assert (model["base"], model["registered"]) == (f"job://{first}", "model://chat@1")
    moved = {**model, "base": "file:///other"}
    again = await service.submit(**tuning, model=moved)
    assert (await service.jobs.get(again)).spec["model"]["registered"] is None
    for base, says in [
        ("model://chat@2", "is a checkpoint"),
        ("model://chat@9", "no version 9"),
        ("model://none@1", "there is no model 'none'"),
    ]:
        with pytest.raises(InvalidDocument, match=says) as caught:
            await service.submit(**tuning, model={"base": base})
        assert caught.value.pointer == "/model/base"
    swept = {
        "metric": "val/loss",
        "sampler": "grid",
        "parameters": {"model.base": {"choices": ["model://chat@1", "file:///b"]}},
    }
    with pytest.raises(InvalidDocument, match=r"can't vary model\.base among registered models"):
        await service.submit(**tuning, model={"base": "file:///base"}, sweep=swept)


async def test_a_version_without_a_checkpoint_is_no_start(
    service: Service, registry: Registry
) -> None:
    first = await done(service)
    await register(registry, "model", first)
    with pytest.raises(InvalidDocument, match="has no checkpoint to start from"):
        await service.submit(init_from="model://model@1")
    second = await done(service, 10)
    await register(registry, "model", second)
    with pytest.raises(InvalidDocument, match="leave it out") as caught:
        await service.submit(init_from={"model": "model://model@2", "job": first})
    assert caught.value.pointer == "/init_from/job"


async def test_many_versions_are_read_by_pages(service: Service, registry: Registry) -> None:
    job_id = await done(service, *range(1, 31))
    for step in range(1, 31):
        wanted = {"name": "model", "job": job_id, "step": step}
        await registry.register(RegistrationRequest.model_validate(wanted), ANN)
    cursor, found = None, []
    while True:
        page = await registry.versions("model", limit=7, cursor=cursor)
        found += [one.version for one in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert found == list(range(30, 0, -1))


@pytest.mark.parametrize("seed", drawn(3))
async def test_random_changes_match_a_plain_record(
    service: Service, registry: Registry, seed: int
) -> None:
    """The oracle is a dictionary for each model."""
    dice = random.Random(seed)
    jobs = [await done(service) for _ in range(4)]
    names = ["a", "B", "ß"]
    versions: dict[str, dict[int, str]] = {name: {} for name in names}
    aliases: dict[str, dict[str, int]] = {name: {} for name in names}
    last = dict.fromkeys(names, 0)
    for _ in range(60):
        name, job, alias = dice.choice(names), dice.choice(jobs), dice.choice(["x", "y"])
        number = dice.randint(1, last[name] + 1)
        spelt = dice.choice([name, name.swapcase()])
        match dice.randrange(5):
            case 0:
                was = next((n for n, j in versions[name].items() if j == job), None)
                got = await register(registry, spelt, job, aliases=[alias])
                if was is None:
                    last[name] += 1
                    was = last[name]
                    versions[name][was] = job
                assert got == was
                aliases[name][alias] = was
            case 1:
                ok = number in versions[name]
                move = registry.move(spelt, alias, AliasRequest(version=number), ANN)
                assert await succeeds(move) is ok
                if ok:
                    aliases[name][alias] = number
            case 2:
                ok = number in versions[name] and number not in aliases[name].values()
                assert await succeeds(registry.delete_version(spelt, number, ANN)) is ok
                if ok:
                    del versions[name][number]
            case 3:
                await succeeds(registry.remove_alias(spelt, alias, ANN))
                aliases[name].pop(alias, None)
            case 4 if dice.random() < 0.2:
                await succeeds(registry.delete(spelt, ANN))
                versions[name], aliases[name] = {}, {}
        for each in names:
            if versions[each]:
                seen = await registry.model(each)
                assert seen.aliases == aliases[each]
                assert seen.num_versions == len(versions[each])
                assert seen.latest_version == max(versions[each])
                shown = (await registry.versions(each)).items
                assert {one.version: one.job_id for one in shown} == versions[each]
    pinned = {job for of_model in versions.values() for job in of_model.values()}
    for job in jobs:
        assert await succeeds(service.jobs.delete(job, actor="ann")) is (job not in pinned)


async def succeeds(call: Any) -> bool:
    try:
        await call
    except (ModelNotFound, ModelVersionNotFound, VersionInUse, CheckpointInUse):
        return False
    return True


@pytest.mark.parametrize(
    "text",
    [
        "model://a",
        "model://a@",
        "model://@1",
        "model://a@0",
        "model://a@Best",
        "a@1",
        "model://a@-1",
    ],
)
def test_other_texts_are_no_references(text: str) -> None:
    with pytest.raises(ValueError, match="must name a version"):
        model_names.parse(text)
