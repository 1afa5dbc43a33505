"""Of an owner's singletons with the same name, one runs at a time, in the order of submission."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.simulation import Simulation
from service.domain.scheduling.outlook.situation import Situation
from service.lifecycle import singletons
from service.loops.shared import queue_view
from tests.marks import RULES
from tests.unit.service.helpers import Service, spec

pytestmark = RULES


def seen(service: Service) -> policy.Snapshot:
    """Return the snapshot for a node on which all jobs could run."""
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    nodes = (policy.Node("n", {"CPU": 64.0}, {"CPU": 64.0}),)
    return policy.Snapshot(waiting, nodes, connected=True)


def starts(service: Service) -> set[str]:
    decisions = policy.plan(seen(service), service.now)
    return {decision.job_id for decision in decisions if isinstance(decision, policy.Start)}


def why(service: Service, job_id: str) -> str:
    (wait,) = (d for d in policy.plan(seen(service), service.now) if d.job_id == job_id)
    assert isinstance(wait, policy.Wait)
    assert wait.reason.code == "waiting_for_jobs"
    return wait.reason.message


async def test_singletons_run_one_after_another(service: Service) -> None:
    first, second, third = [await service.submit(name="n", singleton=True) for _ in range(3)]
    await service.change(third, priority=90)
    assert starts(service) == {first}
    assert why(service, second) == f"waits for the end of {first} (QUEUED, with the same name)"
    assert service.claim(first) is not None
    assert starts(service) == set()
    assert why(service, third) == (
        f"waits for the end of {first} (STARTING, with the same name), "
        f"the end of {second} (QUEUED, with the same name)"
    )
    service.end(first, 1, Cause.PREEMPTED)
    service.advance(60)
    assert starts(service) == {first}, "a job that is retried keeps its position"
    assert service.claim(first, 1) is not None
    service.end(first, 2)
    assert starts(service) == {second}
    await service.jobs.cancel(second)
    assert starts(service) == {third}


async def test_only_jobs_of_the_owner_with_the_same_name_count(service: Service) -> None:
    job_id = await service.submit(name="n", singleton=True)
    other = await service.submit(name="m", singleton=True)
    of_bob, _ = await service.jobs.submit(spec(name="n", singleton=True), owner="bob")
    plain = await service.submit(name="n")
    assert starts(service) == {job_id, other, of_bob.id, plain}


async def test_a_singleton_waits_for_other_jobs_with_its_name(service: Service) -> None:
    array = await service.submit(name="n", array={"size": 2, "max_running": 1})
    running = await service.running(name="n")
    held = await service.submit(name="n")
    await service.change(held, held=True)
    job_id = await service.submit(name="n", singleton=True)
    service.end(running, 1)
    assert array in starts(service)
    assert why(service, job_id) == f"waits for the end of {held} (QUEUED, with the same name)"
    array_id = (await service.jobs.get(array)).array_id
    assert array_id is not None
    await service.jobs.arrays.cancel(array_id)
    assert held in why(service, job_id)
    await service.jobs.cancel(held)
    assert starts(service) == {job_id}


async def test_a_job_is_named_once_and_its_success_can_be_required(service: Service) -> None:
    first = await service.submit(name="n")
    second = await service.submit(name="n", singleton=True, after=[first])
    assert why(service, second) == f"waits for the success of {first} (QUEUED)"


async def test_the_forecast_starts_one_after_another(service: Service) -> None:
    job_ids = [await service.submit(name="n", singleton=True) for _ in range(3)]
    snapshot = seen(service)
    queue = tuple(replace(job, left_s=600.0) for job in snapshot.queue)
    found = Simulation(Situation(replace(snapshot, queue=queue)), service.now).run()
    at = [found[job_id].at for job_id in job_ids]
    assert [round((each - service.now).total_seconds() / 600) for each in at if each] == [0, 1, 2]


async def test_an_unsubmitted_singleton_is_explained(service: Service) -> None:
    first = await service.submit(name="n", singleton=True)
    running = await service.running(name="n")
    (a, b) = service.database.read_sync(lambda s: singletons.of_new_job(s, "ann", "n"))
    assert (a.id, b.id) == (running, first)
    assert not service.database.read_sync(lambda s: singletons.of_new_job(s, "bob", "n"))


@pytest.mark.parametrize("many", ["array", "sweep"])
def test_an_array_is_no_singleton(many: str) -> None:
    parameters = {"train.optimizer.lr": {"min": 0.1, "max": 1.0}}
    sweep = {"metric": "val/accuracy", "trials": 2, "parameters": parameters}
    fields = {"array": {"size": 2}} if many == "array" else {"sweep": sweep}
    with pytest.raises(ValidationError, match=f"set {many}.max_running to 1 instead"):
        spec(singleton=True, **fields)


JOBS = st.lists(
    st.tuples(
        st.sampled_from(["ann", "bob"]),
        st.sampled_from(["n", "m"]),
        st.booleans(),
        st.sampled_from([JobState.QUEUED, JobState.QUEUED, JobState.RUNNING]),
    ),
    max_size=12,
)


@given(JOBS, st.randoms())
def test_a_singleton_waits_as_long_as_another_runs_or_is_ahead(jobs: list, random) -> None:  # type: ignore[type-arg, no-untyped-def]
    """Compare with a direct check of each pair of jobs, as in Slurm's manual."""
    rows = [
        SimpleNamespace(
            id=f"job-{number}", number=number, owner=o, name=n, singleton=s, state=state
        )
        for number, (o, n, s, state) in enumerate(jobs)
    ]
    shuffled = random.sample(rows, len(rows))
    found = singletons.earlier(shuffled)
    for job in rows:
        blocking = {
            other.id
            for other in rows
            if other is not job
            and (other.owner, other.name) == (job.owner, job.name)
            and (other.state is JobState.RUNNING or other.number < job.number)
        }
        waits = job.singleton and job.state is JobState.QUEUED
        named = {one.id for one in found.get(job.id, ())}
        assert bool(named) == bool(waits and blocking)
        assert named <= blocking
