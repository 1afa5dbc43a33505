"""A job waits without slots until the nodes in its plan have its environment."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from dray.spec import JobSpec
from dray.views import JobState
from ray_workers.shared.node_needs import BuildState, JobNeed, NodeEnvironment
from service.loops.scheduling import environment_gate, preparations
from service.runtime import Runtime
from tests.fakes.cluster import READY
from tests.marks import ON_SQLITE, ONE_SET
from tests.unit.service.loops.world import (
    World,
    comes_to,
    eventually,
    keeps_its_promises,
    says,
    waits,
)

pytestmark = ON_SQLITE
WITH_PACKAGES: dict[str, Any] = {"environment": {"python_packages": ["hello"]}}
BUILDING = NodeEnvironment(
    JobNeed.ENVIRONMENT, BuildState.BUILDING, "builds the environment", (), (), log=""
)


async def has_event(runtime: Runtime, job_id: str, code: str) -> Any:
    async def found() -> Any:
        events = (await runtime.queries.events(job_id)).items
        return next((event for event in events if event.code == code), None)

    return await eventually(found, f"{job_id} never had the event {code}")


async def waits_with(runtime: Runtime, job_id: str, words: str) -> None:
    """Wait until the job's explanation contains this text."""

    async def told() -> bool:
        reason = (await runtime.queries.explain(job_id)).reason
        return reason.code == "preparing_environment" and words in reason.message

    await eventually(told, f"{job_id} never had the reason {words!r}")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparations, "BUILDING_S", 0.02)
    monkeypatch.setattr(preparations, "ASK_AGAIN_S", 0.02)


async def test_a_job_waits_for_its_environment_and_others_take_the_slots(world: World) -> None:
    world.fake.environments["node-a"] = BUILDING
    runtime = await world.open()
    job_id = await world.submit(runtime, workers=4, **WITH_PACKAGES)
    await waits_with(runtime, job_id, "node-a.fake builds the environment")
    await has_event(runtime, job_id, "preparing_environment")
    other = await world.submit(runtime, workers=4)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    assert (await runtime.jobs.get(job_id)).state is JobState.QUEUED
    world.fake.environments["node-a"] = READY
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    event = await has_event(runtime, job_id, "environment_ready")
    assert event.data["packages"] == ["hello==1.0"]
    events = (await runtime.queries.events(job_id)).items
    assert [e.code for e in events].count("preparing_environment") == 1
    await keeps_its_promises(world, runtime, job_id)


async def test_a_node_that_does_not_answer_holds_up_nobody_else(world: World) -> None:
    world.fake.environments["node-a"] = None
    world.fake.add_node("node-b", {"CPU": 1.0})
    runtime = await world.open()
    job_id = await world.submit(runtime, workers=4, **WITH_PACKAGES)
    await says(runtime, job_id, "preparing_environment")
    with_none = await world.submit(runtime, workers=4)
    await comes_to(runtime, with_none, JobState.SUCCEEDED)
    world.fake.environments["node-a"] = READY
    world.fake.pulse.beat()
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_the_installers_sentence_ends_the_job_and_the_next_one_is_tried(
    world: World,
) -> None:
    sentence = "Because no-such was not found in the package registry"
    world.fake.environments["node-a"] = replace(
        BUILDING, state=BuildState.FAILED, message=sentence, log="the whole log"
    )
    runtime = await world.open()
    job_id = await world.submit(runtime, max_retries=5, **WITH_PACKAGES)
    with pytest.raises(AssertionError, match="it ended"):
        await comes_to(runtime, job_id, JobState.SUCCEEDED)
    job = await runtime.jobs.get(job_id)
    assert (job.state, job.attempt) == (JobState.FAILED, 0)
    assert job.reason.code == "cannot_run"
    assert sentence in job.reason.message
    assert (await has_event(runtime, job_id, "cannot_run")).data["log"] == "the whole log"
    world.fake.environments["node-a"] = READY
    again = await world.submit(runtime, **WITH_PACKAGES)
    await comes_to(runtime, again, JobState.SUCCEEDED)


async def test_an_index_that_does_not_answer_costs_the_job_nothing(world: World) -> None:
    world.fake.environments["node-a"] = replace(
        BUILDING, state=BuildState.UNREACHABLE, message="Failed to fetch: https://index"
    )
    runtime = await world.open()
    job_id = await world.submit(runtime, max_retries=0, **WITH_PACKAGES)
    await waits_with(runtime, job_id, "tries again: Failed to fetch")
    world.fake.environments["node-a"] = READY
    job = await comes_to(runtime, job_id, JobState.SUCCEEDED)
    assert job.attempt == 1


@ONE_SET
@pytest.mark.parametrize("state", [BuildState.UNREACHABLE, BuildState.FAILED, BuildState.READY])
async def test_what_an_installer_says_in_broken_text_stops_nobody(
    world: World, state: BuildState
) -> None:
    """A user's own package repository can write to the installer's output, and therefore to its
    messages."""
    broken = "half of a character: \ud800, and NUL: \0" + "x" * 10_000
    told = {"message": broken, "packages": (broken,), "replaced": (broken,), "log": broken}
    world.fake.environments["node-a"] = replace(BUILDING, state=state, **told)
    runtime = await world.open()
    job_id = await world.submit(runtime, **WITH_PACKAGES)
    await world.fake.until(lambda: world.fake.preparations, "no node was asked")
    other = await world.submit(runtime)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    if state is BuildState.UNREACHABLE:
        await waits_with(runtime, job_id, "half of a character: ?, and NUL: ␀")
        assert len((await runtime.queries.explain(job_id)).reason.message) <= 2000
    else:
        await is_over(runtime, job_id)
        assert (await runtime.jobs.get(job_id)).attempt == (state is BuildState.READY)


async def is_over(runtime: Runtime, job_id: str) -> None:
    async def over() -> bool:
        return (await runtime.jobs.get(job_id)).state.is_terminal

    await eventually(over, f"{job_id} never ended")


async def test_the_second_job_asks_no_node_again(world: World) -> None:
    runtime = await world.open()
    first = await world.submit(runtime, **WITH_PACKAGES)
    await comes_to(runtime, first, JobState.SUCCEEDED)
    asked = len(world.fake.preparations)
    second = await world.submit(runtime, **WITH_PACKAGES)
    await comes_to(runtime, second, JobState.SUCCEEDED)
    assert asked == len(world.fake.preparations) == 1


async def test_nodes_prepare_and_launch_for_the_owner_of_the_job(world: World) -> None:
    runtime = await world.open()
    document = {"name": "trains", "recipe": "image_classification", **WITH_PACKAGES}
    for owner in ("ann", "bob"):
        job, _ = await runtime.jobs.submit(JobSpec.model_validate(document), owner=owner)
        await comes_to(runtime, job.id, JobState.SUCCEEDED)
    assert [needs.policy.owner for _, needs in world.fake.preparations] == ["ann", "bob"]
    assert [s.environment_policy.owner for s in world.fake.launches] == ["ann", "bob"]


async def test_a_job_that_is_cancelled_meanwhile_never_starts(world: World) -> None:
    world.plays["waits"] = waits
    world.fake.environments["node-a"] = BUILDING
    runtime = await world.open()
    job_id = await world.submit(runtime, **WITH_PACKAGES)
    await says(runtime, job_id, "preparing_environment")
    await runtime.jobs.cancel(job_id)
    world.fake.environments["node-a"] = READY
    other = await world.submit(runtime)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    assert (await runtime.jobs.get(job_id)).state is JobState.CANCELLED
    assert [spec.job_id for spec in world.fake.launches] == [other]


async def test_the_last_job_that_needs_it_has_a_node_end_what_it_prepares(world: World) -> None:
    world.fake.environments["node-a"] = BUILDING
    runtime = await world.open()
    first, second = [await world.submit(runtime, **WITH_PACKAGES) for _ in range(2)]
    for job_id in (first, second):
        await waits_with(runtime, job_id, "builds the environment")
    await runtime.jobs.cancel(first)
    asked = len(world.fake.preparations)
    await world.fake.until(lambda: len(world.fake.preparations) > asked + 3, "it asks no more")
    assert world.fake.dropped == []
    await runtime.jobs.cancel(second)
    await world.fake.until(lambda: bool(world.fake.dropped), "the node does not know of it")
    assert world.fake.dropped == [world.fake.preparations[-1]]
    asked = len(world.fake.preparations)
    await asyncio.sleep(0.2)
    assert (len(world.fake.preparations), len(world.fake.dropped)) == (asked, 1)
    again = await world.submit(runtime, **WITH_PACKAGES)
    world.fake.environments["node-a"] = READY
    await comes_to(runtime, again, JobState.SUCCEEDED)
    assert len(world.fake.dropped) == 1, "ready environments stay"


async def test_nodes_get_no_variables_and_jobs_without_packages_ask_nothing(world: World) -> None:
    runtime = await world.open()
    plain = await world.submit(runtime, environment={"env": {"A": "canary"}})
    await comes_to(runtime, plain, JobState.SUCCEEDED)
    assert world.fake.preparations == []
    both = await world.submit(runtime, environment={"env": {"A": "canary"}, "secrets": ["TOKEN"]})
    await comes_to(runtime, both, JobState.SUCCEEDED)
    assert [node for node, *_ in world.fake.preparations] == ["node-a"]
    assert "canary" not in str(world.fake.preparations)


async def test_a_job_waits_for_code_that_its_nodes_fetch(world: World) -> None:
    fetching = replace(BUILDING, need=JobNeed.CODE, message="fetches it from git.example.org")
    world.fake.environments["node-a"] = fetching
    runtime = await world.open()
    code = {"git": "https://git.example.org/me/net.git", "commit": "a" * 40, "credentials": "mine"}
    document = {"recipe": None, "script": {"code": code, "entrypoint": "train.py"}}
    job_id = await world.submit(runtime, workers=4, **document)
    await waits_with(
        runtime, job_id, "its code is being fetched: node-a.fake fetches it from git.example.org"
    )
    other = await world.submit(runtime, workers=4)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    world.fake.environments["node-a"] = replace(READY, need=JobNeed.CODE, packages=())
    await comes_to(runtime, job_id, JobState.SUCCEEDED)
    events = (await runtime.queries.events(job_id)).items
    assert "environment_ready" not in [event.code for event in events]
    _, needs = world.fake.preparations[-1]
    assert needs.code is not None
    assert needs.environment is None
    assert (needs.code.git, needs.code.credentials) == (code["git"], "mine")

    gone = replace(fetching, state=BuildState.FAILED, message="fatal: not our ref")
    world.fake.environments["node-a"] = gone
    document["script"]["code"] = code | {"commit": "b" * 40}
    failing = await world.submit(runtime, **document)
    with pytest.raises(AssertionError, match="it ended"):
        await comes_to(runtime, failing, JobState.SUCCEEDED)
    job = await runtime.jobs.get(failing)
    assert (job.state, job.attempt) == (JobState.FAILED, 0)
    assert job.reason.message == "its code can't be fetched: fatal: not our ref"


async def test_those_that_wait_for_their_environment_starve_nobody(world: World) -> None:
    world.fake.environments["node-a"] = BUILDING
    runtime = await world.open()
    count = 2 * environment_gate.MAX_PLANS + 1
    waiting = [await world.submit(runtime, workers=4, **WITH_PACKAGES) for _ in range(count)]
    other = await world.submit(runtime, workers=4)
    await comes_to(runtime, other, JobState.SUCCEEDED)
    assert {(await runtime.jobs.get(job_id)).state for job_id in waiting} == {JobState.QUEUED}
    world.fake.environments["node-a"] = READY
    for job_id in waiting:
        await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_a_job_that_was_not_next_for_long_is_asked_for_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the meantime, its node was no longer asked."""
    monkeypatch.setattr(environment_gate, "PLANNED_ANEW_S", 0.0)
    world.plays["waits"] = waits
    world.fake.environments["node-a"] = BUILDING
    runtime = await world.open()
    job_id = await world.submit(runtime, workers=4, **WITH_PACKAGES)
    await waits_with(runtime, job_id, "builds the environment")
    other = await world.submit(runtime, "waits", workers=4)
    await comes_to(runtime, other, JobState.RUNNING)
    monkeypatch.setattr(preparations, "FORGOTTEN_S", 0.05)

    async def is_quiet() -> bool:
        before = len(world.fake.preparations)
        await asyncio.sleep(0.2)
        return len(world.fake.preparations) == before

    await eventually(is_quiet, "the node is asked for ever")
    monkeypatch.setattr(preparations, "FORGOTTEN_S", 60.0)
    world.fake.environments["node-a"] = READY
    await runtime.jobs.cancel(other)
    await comes_to(runtime, job_id, JobState.SUCCEEDED)


async def test_a_group_that_waits_for_a_node_keeps_no_slots_from_others(world: World) -> None:
    world.plays["waits"] = waits
    world.fake.environments["node-b"] = replace(
        BUILDING, state=BuildState.FAILED, message="no such package"
    )
    runtime = await world.open()
    elastic = {"elastic": {"min_workers": 4}}
    first = await world.submit(runtime, "waits", workers=8, **elastic, **WITH_PACKAGES)
    await comes_to(runtime, first, JobState.RUNNING)
    world.fake.add_node("node-b", {"CPU": 4.0})
    other = await world.submit(runtime, workers=4)
    await comes_to(runtime, other, JobState.SUCCEEDED)

    async def is_told() -> bool:
        return "no such package" in (await runtime.queries.explain(first)).reason.message

    await eventually(is_told, "no reason is shown why the group does not grow")
    asked = len(world.fake.preparations)
    await asyncio.sleep(0.3)
    assert len(world.fake.preparations) == asked, "a node that has failed is left alone for a while"
