"""The replay of measured jobs, on traces that are made here, and on the published ones if there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scheduler import measure, replay, traces
from benchmarks.scheduler.replay import ReplayedJob
from benchmarks.scheduler.tiresias import LONG_GPU_S, Tiresias


@pytest.fixture
def application(tmp_path: Path) -> traces.Application:
    """Ten epochs of 100 steps each with the batch 4, of 1 s on one GPU and 0.6 s on two."""
    folder = tmp_path / "ncf"
    folder.mkdir()
    head = "placement,local_bsz,step_time,sync_time\n"
    placements = "1,4,1.0,0.0\n1,8,2.0,0.0\n2,4,0.6,0.1\n2,8,1.1,0.1\n11,4,0.8,0.3\n11,8,1.3,0.3\n"
    (folder / "placements.csv").write_text(head + placements)
    head = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n"
    scalability = "".join(
        f"{nodes},{gpus},{size},{nodes + gpus / 100 + size / 10000},0.5\n"
        for nodes in (6, 8)
        for gpus in (8, 16)
        for size in (4, 8)
    )
    (folder / "scalability.csv").write_text(head + scalability)
    for size in (4, 8, 64):
        rows = "".join(f"{100.0 * e},{e},0,1.0,{3.0 if size == 4 else 5.0}\n" for e in range(1, 11))
        head = "progress,iteration,metric,grad_sqr,grad_var\n"
        (folder / f"validation-{size}.csv").write_text(head + rows)
    return traces.Application(folder)


def job(
    application: traces.Application, name: str = "a", at: float = 0.0, gpus: int = 1
) -> ReplayedJob:
    return ReplayedJob(name, application, at, gpus, 4)


def test_step_times_are_those_of_the_gpus_and_between_them_linear(
    application: traces.Application,
) -> None:
    assert application.step_time((1,), 4) == (1.0, 4)
    assert application.step_time((2,), 12) == pytest.approx((0.85, 12))
    assert application.step_time((1,), 8) == pytest.approx((2.0, 8)), "two micro-steps of four"
    seven_nodes = (2,) * 5 + (1, 1)
    assert application.step_time(seven_nodes, 48)[0] == pytest.approx(7.12 + 4 / 10000)


def test_a_step_is_worth_what_the_noise_of_its_gradients_says(
    application: traces.Application,
) -> None:
    assert application.gradients(4, 0).gain(1.0) == 1.0
    assert application.gradients(8, 0).gain(2.0) == pytest.approx(6.0 / 3.5)
    assert application.gradients(6, 0).variance == 4.0


def test_a_job_trains_as_long_as_its_steps_take_and_starts_anew_when_it_is_moved(
    application: traces.Application,
) -> None:
    alone = job(application, at=10.0)
    replay.replay([alone], Tiresias())
    assert alone.finished_s == pytest.approx(60.0 + replay.RESTART_S + 1000.0)
    moved = job(application)
    moved.allocate({0: 1})
    moved.train(0.0)
    moved.allocate({1: 1})
    moved.train(60.0)
    assert moved.share_done == pytest.approx(0.06)
    assert moved.gpu_s == 120.0


def test_short_jobs_go_ahead_of_those_that_have_had_much(application: traces.Application) -> None:
    jobs = [job(application, name, gpus=gpus) for name, gpus in (("a", 60), ("b", 8), ("c", 4))]
    policy = Tiresias()
    assert [one.name for one in policy.running(jobs, 0.0)] == ["a", "c"]
    jobs[0].gpu_s = LONG_GPU_S
    assert [one.name for one in policy.running(jobs, 0.0)] == ["b", "c"]


@pytest.mark.skipif(measure.data_folder() is None, reason=f"{measure.DATA} names no traces")
def test_the_replay_is_faithful() -> None:
    folder = measure.data_folder()
    assert folder is not None
    for number, average_s in measure.averages_s(folder).items():
        assert average_s == pytest.approx(measure.PUBLISHED_S[number], rel=measure.FAITHFUL)
