"""A job with a begin time waits without reserving slots, and starts then."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from dray.views import JobState
from ray_workers.shared.contracts import Cause
from service.domain.scheduling import policy
from service.domain.scheduling.outlook.simulation import Simulation
from service.domain.scheduling.outlook.situation import Situation
from service.lifecycle import transitions
from service.loops.shared import queue_view
from tests.marks import RULES
from tests.unit.service.helpers import Service, spec

pytestmark = RULES
HOUR = 3600.0


def after(service: Service, seconds: float) -> str:
    return (service.now + timedelta(seconds=seconds)).isoformat()


def seen(service: Service, *, cpus: float = 1.0, connected: bool = True) -> policy.Snapshot:
    """Return the snapshot for a single node with free CPUs."""
    waiting, _ = service.database.read_sync(lambda s: queue_view.snapshot(s, service.now))
    nodes = (policy.Node("n", {"CPU": 4.0}, {"CPU": cpus}),)
    return policy.Snapshot(waiting, nodes, connected=connected)


def note(service: Service, **more: object) -> dict[str, policy.Decision]:
    """Make a plan, store it as the scheduler would, and return the decisions."""
    decisions = policy.plan(seen(service, **more), service.now)  # type: ignore[arg-type]
    waits = [decision for decision in decisions if isinstance(decision, policy.Wait)]
    service.database.write_sync(lambda s: transitions.note_waiting(s, waits, service.now))
    return {decision.job_id: decision for decision in decisions}


async def test_a_job_waits_for_its_begin_time_and_lets_others_pass(service: Service) -> None:
    early = await service.submit(begin_at=after(service, HOUR), priority=90)
    other = await service.submit()
    decisions = note(service)
    assert isinstance(decisions[other], policy.Start)
    shown = await service.jobs.get(early)
    assert (shown.state, shown.reason.code) == (JobState.QUEUED, "begins_at")
    begin = shown.begin_at
    assert begin == service.now + timedelta(hours=1)
    assert shown.reason.message == f"begins at {begin:%Y-%m-%d %H:%M:%S} UTC"
    service.advance(HOUR)
    assert isinstance(note(service)[early], policy.Start)


async def test_a_claim_before_the_begin_time_is_lost(service: Service) -> None:
    job_id = await service.submit(begin_at=after(service, 10))
    assert service.claim(job_id) is None
    service.advance(10)
    assert service.claim(job_id) is not None


async def test_a_begin_time_in_the_past_has_no_effect(service: Service) -> None:
    for seconds in (0, -30, -86400):
        job_id = await service.submit(begin_at=after(service, seconds))
        assert (await service.jobs.get(job_id)).begin_at is None
        assert isinstance(note(service)[job_id], policy.Start)
        await service.jobs.cancel(job_id)


async def test_a_job_waits_only_from_its_begin_time(service: Service) -> None:
    job_id = await service.submit(begin_at=after(service, HOUR))
    note(service, cpus=0.0)
    service.advance(HOUR / 2)
    note(service, cpus=0.0, connected=False)
    service.advance(HOUR / 2)
    note(service, cpus=0.0)
    service.advance(100)
    note(service, cpus=0.0)
    (job,) = seen(service).queue
    assert (job.job_id, job.waited_s) == (job_id, 100.0)


async def test_a_retry_does_not_wait_for_the_begin_time_again(service: Service) -> None:
    job_id = await service.submit(begin_at=after(service, 10))
    service.advance(10)
    assert service.claim(job_id) is not None
    service.end(job_id, 1, Cause.NODE_LOST)
    service.advance(60)
    assert isinstance(note(service)[job_id], policy.Start)


async def test_every_job_of_an_array_and_of_a_sweep_begins_then(service: Service) -> None:
    at = after(service, HOUR)
    await service.submit(begin_at=at, array={"size": 2})
    sweep = {
        "metric": "val/accuracy",
        "trials": 2,
        "parameters": {"train.optimizer.lr": {"min": 0.1, "max": 1.0}},
    }
    await service.submit(begin_at=at, sweep=sweep)
    codes = [d.reason.code for d in note(service).values() if isinstance(d, policy.Wait)]
    assert codes == ["begins_at"] * 4


async def test_a_held_job_and_a_job_after_others_say_that_first(service: Service) -> None:
    other = await service.submit()
    waiting = await service.submit(after=[other], begin_at=after(service, HOUR))
    held = await service.submit(begin_at=after(service, HOUR))
    await service.change(held, held=True)
    decisions = note(service)
    codes = {name: d.reason.code for name, d in decisions.items() if isinstance(d, policy.Wait)}
    assert codes == {waiting: "waiting_for_jobs", held: "held"}
    job = await service.jobs.cancel(held)
    assert job.state is JobState.CANCELLED


async def test_the_forecast_counts_the_begin_time(service: Service) -> None:
    begins_in = {
        await service.submit(begin_at=after(service, seconds)): seconds
        for seconds in (HOUR, 3 * HOUR)
    }
    now = await service.submit()
    snapshot = seen(service)
    queue = tuple(replace(job, left_s=600.0) for job in snapshot.queue)
    found = Simulation(Situation(replace(snapshot, queue=queue)), service.now).run()
    assert found[now].at == service.now
    for job_id, seconds in begins_in.items():
        at = found[job_id].at
        assert at is not None
        late_s = (at - service.now).total_seconds() - seconds
        assert 0 <= late_s <= 0.05 * seconds + 5  # the steps of the simulation


async def test_a_begin_time_beyond_the_forecast_is_its_reason(service: Service) -> None:
    job_id = await service.submit(begin_at=after(service, 60 * 86400))
    expected = Simulation(Situation(seen(service)), service.now).run()[job_id]
    assert expected.at is None
    assert expected.why is not None
    assert expected.why.code == "begins_at"
    assert expected.not_before == service.now + timedelta(days=60)


async def test_a_user_whose_jobs_all_begin_later_is_not_active(service: Service) -> None:
    """Otherwise, the user's unused share would put the other users ahead of theirs."""
    await service.submit(begin_at=after(service, HOUR))
    job, _ = await service.jobs.submit(spec(), owner="bob")
    snapshot = seen(service)
    situation = Situation(snapshot)
    assert situation.first_jobs().accounts == {("default", "bob")}
    assert job.id in {each.job_id for each in snapshot.queue}
