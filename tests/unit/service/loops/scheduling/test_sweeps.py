"""Sweeps in a service that runs its loops: trials with values from Optuna, and trials that are
stopped."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dray import views
from dray.filters import JobFilter
from dray.views import JobState
from service.loops.scheduling import trial_values
from service.runtime import Runtime
from service.sweeps import optuna_sampler
from tests.fakes.attempt import FakeRank
from tests.marks import ONE_SET
from tests.unit.service.loops.world import PATIENCE_S, World, comes_to, eventually, says

LR = {"train.optimizer.lr": {"min": 1e-4, "max": 1.0, "log": True}}


def lr_of(rank: FakeRank) -> float:
    lr: float = rank.spec.spec["train"]["optimizer"]["lr"]
    assert rank.spec.parameters == {"train.optimizer.lr": lr}
    return lr


async def measures(rank: FakeRank) -> None:
    """Reports its learning rate as the loss."""
    rank.report(1, train_loss=lr_of(rank))


async def swept(world: World, runtime: Runtime, play: str, **fields: Any) -> str:
    sweep = {"metric": "train/loss", "parameters": LR, **fields}
    job = await runtime.jobs.get(await world.submit(runtime, play, sweep=sweep))
    assert job.array_id is not None
    return job.array_id


async def is_over(runtime: Runtime, sweep_id: str) -> views.JobSweep:
    async def settled() -> views.JobSweep | None:
        sweep = await runtime.jobs.sweeps.get(sweep_id)
        return sweep if sweep.is_settled() else None

    found = await eventually(settled, "the sweep is not over")
    assert found is not None
    return found


async def trials_of(runtime: Runtime, sweep_id: str) -> list[views.Trial]:
    return (await runtime.jobs.sweeps.trials(sweep_id, limit=500, cursor=None)).items


@ONE_SET
async def test_trials_ask_optuna_when_they_start(world: World) -> None:
    world.plays["measures"] = measures
    runtime = await world.open()
    given = {"sampler": "optuna", "trials": 6, "max_running": 1}
    sweep_id = await swept(world, runtime, "measures", **given)
    sweep = await is_over(runtime, sweep_id)
    assert sweep.counts == {JobState.SUCCEEDED: 6}
    trials = await trials_of(runtime, sweep_id)
    values = [trial.value for trial in trials]
    assert values == [(trial.parameters or {})["train.optimizer.lr"] for trial in trials]
    assert sweep.best is not None
    assert sweep.best.value == min(value for value in values if value is not None)
    found = await runtime.jobs.list(JobFilter(where=f"train.optimizer.lr = {values[2]!r}"))
    assert [job.id for job in found.items] == [trials[2].job_id]
    again = await is_over(runtime, await swept(world, runtime, "measures", **given))
    assert [trial.parameters for trial in await trials_of(runtime, again.id)] == [
        trial.parameters for trial in trials
    ]


@ONE_SET
async def test_another_service_goes_on_with_the_study(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart, trials have the same values as in a single process."""
    told: list[int] = []
    ask = optuna_sampler.ask

    def counted(sweep: Any, index: int, earlier: Any) -> dict[str, Any]:
        told.append(len(earlier))
        return ask(sweep, index, earlier)

    async def gated(rank: FakeRank) -> None:
        rank.report(1, train_loss=lr_of(rank))
        if rank.spec.array_index == 2:
            await world.gate.wait()

    monkeypatch.setattr(optuna_sampler, "ask", counted)
    world.plays |= {"gated": gated, "measures": measures}
    first = await world.open()
    given = {"sampler": "optuna", "trials": 5, "max_running": 1, "seed": 3}
    sweep_id = await swept(world, first, "gated", **given)
    third = (await trials_of(first, sweep_id))[2].job_id
    await comes_to(first, third, JobState.RUNNING)
    await world.drop(first)
    second = await world.open()
    world.gate.set()
    await is_over(second, sweep_id)
    assert told == [0, 1, 2, 3, 4]
    one_process = await is_over(second, await swept(world, second, "measures", **given))
    assert [trial.parameters for trial in await trials_of(second, sweep_id)] == [
        trial.parameters for trial in await trials_of(second, one_process.id)
    ]


async def test_a_trial_whose_sampler_fails_waits_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.plays["measures"] = measures
    broken = True
    ask = optuna_sampler.ask

    def breaks(sweep: Any, index: int, earlier: Any) -> dict[str, Any]:
        if broken:
            raise ImportError("No module named 'optuna', \0 \ud800")
        return ask(sweep, index, earlier)

    monkeypatch.setattr(optuna_sampler, "ask", breaks)
    monkeypatch.setattr(trial_values, "ASK_AGAIN_S", 0.5)
    runtime = await world.open()
    sweep_id = await swept(world, runtime, "measures", sampler="optuna", trials=1)
    (trial,) = await trials_of(runtime, sweep_id)
    explained = await says(runtime, trial.job_id, "sampler_unavailable")
    assert "No module named 'optuna'" in explained.reason.message
    for _ in range(20):
        assert (await runtime.queries.explain(trial.job_id)).reason == explained.reason
    other = await world.submit(runtime, workers=4)  # all slots
    await comes_to(runtime, other, JobState.SUCCEEDED)
    broken = False
    assert (await is_over(runtime, sweep_id)).counts == {JobState.SUCCEEDED: 1}


@ONE_SET
async def test_values_that_do_not_go_together_fail_their_trial_alone(world: World) -> None:
    """It is not possible to check every combination of values that Optuna might choose at
    submission."""
    world.plays["ends"] = ends
    runtime = await world.open()
    both = {"train.optimizer.name": ["sgd", "adamw"], "train.optimizer.momentum": [0.5]}
    sweep = {"metric": "train/loss", "sampler": "optuna", "trials": 8, "parameters": both}
    document = {"train": {"optimizer": {"name": "sgd"}}, "sweep": sweep}
    job = await runtime.jobs.get(await world.submit(runtime, "ends", **document))
    assert job.array_id is not None
    await is_over(runtime, job.array_id)
    for trial in await trials_of(runtime, job.array_id):
        is_good = (trial.parameters or {})["train.optimizer.name"] == "sgd"
        assert trial.state is (JobState.SUCCEEDED if is_good else JobState.FAILED)
        assert trial.reason.code == ("succeeded" if is_good else "document_refused")


async def test_a_slow_sampler_holds_up_no_other_job(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.plays["measures"] = measures
    goes_on = threading.Event()
    ask = optuna_sampler.ask

    def slow(sweep: Any, index: int, earlier: Any) -> dict[str, Any]:
        assert goes_on.wait(PATIENCE_S)
        return ask(sweep, index, earlier)

    monkeypatch.setattr(optuna_sampler, "ask", slow)
    runtime = await world.open()
    sweep_id = await swept(world, runtime, "measures", sampler="optuna", trials=2)
    await comes_to(runtime, await world.submit(runtime), JobState.SUCCEEDED)
    assert {trial.parameters for trial in await trials_of(runtime, sweep_id)} == {None}
    goes_on.set()
    assert (await is_over(runtime, sweep_id)).counts == {JobState.SUCCEEDED: 2}


@ONE_SET
async def test_slots_do_not_wait_for_a_sampler_that_hangs_nor_do_other_sweeps(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.plays |= {"measures": measures, "hangs": measures}
    goes_on = threading.Event()
    ask = optuna_sampler.ask

    def hangs(sweep: Any, index: int, earlier: Any) -> dict[str, Any]:
        if sweep.seed == 7:
            assert goes_on.wait(PATIENCE_S)
        return ask(sweep, index, earlier)

    monkeypatch.setattr(optuna_sampler, "ask", hangs)
    monkeypatch.setattr(trial_values, "PATIENCE_S", 0.05)
    runtime = await world.open()
    hanging = await swept(world, runtime, "hangs", sampler="optuna", trials=4, seed=7)
    first = (await trials_of(runtime, hanging))[0].job_id
    explained = await says(runtime, first, "sampler_unavailable")
    assert explained.reason.message == "the sweep's sampler has not returned values yet"
    other = await world.submit(runtime, workers=4)  # all slots
    await comes_to(runtime, other, JobState.SUCCEEDED)
    asking = await swept(world, runtime, "measures", sampler="optuna", trials=2)
    assert (await is_over(runtime, asking)).counts == {JobState.SUCCEEDED: 2}
    goes_on.set()
    assert (await is_over(runtime, hanging)).counts == {JobState.SUCCEEDED: 4}


async def test_no_round_keeps_slots_for_a_sampler_that_has_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def breaks(*_: Any) -> dict[str, Any]:
        nonlocal asked
        asked += 1
        raise ValueError("no values")

    monkeypatch.setattr(optuna_sampler, "ask", breaks)
    monkeypatch.setattr(trial_values, "ASK_AGAIN_S", 0.02)
    runtime = await world.open()
    sweep_id = await swept(world, runtime, "measures", sampler="optuna", trials=4)
    (first, *_) = await trials_of(runtime, sweep_id)
    await says(runtime, first.job_id, "sampler_unavailable")
    other = await world.submit(runtime, workers=4)  # all slots
    await comes_to(runtime, other, JobState.SUCCEEDED)
    before = asked
    await runtime.jobs.cancel(first.job_id)

    async def is_asked_of_others() -> bool:
        return asked > before + 3

    await eventually(is_asked_of_others, "the sampler is not asked again")


async def ends(rank: FakeRank) -> None:
    rank.report(1, train_loss=1.0)


@ONE_SET
async def test_the_worse_trials_are_stopped_and_their_slots_are_free(world: World) -> None:
    """Trial n reports the loss n; all trials except the best continue until they are stopped."""

    async def loses(rank: FakeRank) -> None:
        index = rank.spec.array_index
        assert index is not None
        for step in range(1, 9):
            rank.report(step, train_loss=float(index))
        if index:
            await world.gate.wait()

    world.plays["loses"] = loses
    runtime = await world.open()
    sweep_id = await swept(
        world,
        runtime,
        "loses",
        sampler="random",
        trials=6,
        max_running=1,
        early_stopping={"min_steps": 2, "eta": 2},
    )
    sweep = await is_over(runtime, sweep_id)
    assert sweep.counts == {JobState.SUCCEEDED: 1, JobState.CANCELLED: 5}
    assert sweep.stopped_early == 5
    assert sweep.best is not None
    assert sweep.best.index == 0
    for trial in await trials_of(runtime, sweep_id):
        await world.fake.forgotten(trial.job_id, 1)
