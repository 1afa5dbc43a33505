"""The replay of measured jobs, on traces that are made here, and on the published ones if there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

from benchmarks import report
from benchmarks.scheduler import locality, measure, replay, snapshots, traces, workloads
from benchmarks.scheduler.default_policy import DefaultPolicy
from benchmarks.scheduler.elastic_policy import ElasticPolicy
from benchmarks.scheduler.generated import backlog
from benchmarks.scheduler.generated.dray_policy import DrayPolicy
from benchmarks.scheduler.generated.simulator import simulate
from benchmarks.scheduler.replay import ReplayedJob
from benchmarks.scheduler.tiresias import LONG_GPU_S, Tiresias
from service.domain.scheduling.placement import slots
from service.domain.scheduling.policy import Wait, plan


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
    return ReplayedJob(name, application, at, "user", gpus, 4)


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
    moved.allocate({0: 1}, 0.0)
    moved.train(0.0)
    moved.allocate({1: 1}, 60.0)
    moved.train(60.0)
    assert moved.share_done == pytest.approx(0.06)
    assert moved.gpu_s == 120.0


def test_short_jobs_go_ahead_of_those_that_have_had_much(application: traces.Application) -> None:
    jobs = [job(application, name, gpus=gpus) for name, gpus in (("a", 60), ("b", 8), ("c", 4))]
    policy = Tiresias()
    assert list(policy.allocate(jobs, 0.0)) == ["a", "c"]
    jobs[0].gpu_s = LONG_GPU_S
    assert list(policy.allocate(jobs, 0.0)) == ["b", "c"]


def test_a_job_alone_takes_as_long_as_its_steps(application: traces.Application) -> None:
    assert job(application, at=10.0).alone_s == pytest.approx(replay.RESTART_S + 1000.0)


def test_the_default_policy_lets_a_short_job_pass_a_long_one(
    application: traces.Application,
) -> None:
    def waits() -> list[ReplayedJob]:
        """Two that fill the cluster, and one that takes a twentieth of their time."""
        jobs = [job(application, "long", gpus=64), job(application, "short", at=1.0, gpus=64)]
        jobs[1].batch_size = 64
        return jobs

    for policy, first in ((Tiresias(), "long"), (DefaultPolicy(), "short")):
        jobs = waits()
        replay.replay(jobs, policy)
        assert min(jobs, key=lambda one: one.completion_s).name == first
        assert all(one.completion_s >= one.alone_s for one in jobs)


def test_a_replayed_job_reports_its_step_times_and_its_noise(
    application: traces.Application,
) -> None:
    alone = job(application)
    alone.change_batch(8, 0.0)
    alone.allocate({0: 1}, 0.0)
    alone.train(0.0)
    assert [each.batch_size for each in alone.step_times.values()] == [8]
    assert alone.noise_scale == 20.0, "five smallest batches"
    assert alone.steps_left == pytest.approx((1000 - 15 * 6.0 / 3.5) / (6.0 / 3.5))


def test_the_policy_chooses_the_batch_of_a_replayed_job_within_its_range(
    application: traces.Application,
) -> None:
    one = job(application)
    one.batch_range = (4, 16)
    policy, sizes = ElasticPolicy(knows_earlier=False), []

    class Watched:
        def allocate(self, active: Sequence[ReplayedJob], now: float) -> replay.Allocation:
            given = policy.allocate(active, now)
            sizes.append(one.batch_size)
            return given

    replay.replay([one], Watched())
    assert sizes[0] == 4, "nothing is known of it"
    assert 4 < max(sizes) <= 16
    assert all(later <= 2 * size for size, later in pairwise(sizes))


def test_elastic_jobs_share_the_cluster_and_have_all_of_it_alone(
    application: traces.Application,
) -> None:
    jobs = [job(application, "first"), job(application, "second", at=120.0)]
    for one in jobs:
        one.batch_size = 16
    policy = ElasticPolicy(knows_earlier=False)
    sizes: list[dict[str, int]] = []

    class Watched:
        def allocate(self, active: Sequence[ReplayedJob], now: float) -> replay.Allocation:
            given = policy.allocate(active, now)
            sizes.append({name: sum(nodes.values()) for name, nodes in given.items()})
            return given

    replay.replay(jobs, Watched())
    assert sizes[0] == {"first": 1}, "nothing is known of it"
    assert sizes[1] == {"first": 2}, "twice what it has shown"
    assert all(sum(each.values()) <= 64 for each in sizes)
    assert all({"first", "second"} == set(each) for each in sizes[3:6])
    assert all(one.completion_s < 1000.0 for one in jobs)


def test_drawn_workloads_are_the_same_for_the_same_seed(application: traces.Application) -> None:
    rows = [
        {"name": f"ncf-{at}", "time": at, "application": "ncf", "num_replicas": 1, "batch_size": 4}
        for at in range(100, 5000, 100)
    ]
    of = dict.fromkeys(workloads.NUMBERS, rows)
    drawn = workloads.drawn(of, 1)
    assert drawn == workloads.drawn(of, 1) != workloads.drawn(of, 2)
    times = [row["time"] for row in drawn]
    assert times == sorted(times)
    jobs = workloads.jobs_of(drawn, {"ncf": application}, 1)
    assert {one.user for one in jobs} <= {f"user-{user}" for user in range(workloads.NUM_USERS)}
    assert len({one.name for one in jobs}) == len(rows)


def test_a_drawn_snapshot_has_jobs_of_each_sort_and_holds_no_more_than_there_is() -> None:
    drawn = snapshots.drawn(300, num_nodes=20)
    assert drawn == snapshots.drawn(300, num_nodes=20) != snapshots.drawn(300, 1, num_nodes=20)
    for node in drawn.nodes:
        held = slots.held_on(node.id, drawn.holders)
        assert all(
            held.get(name, 0.0) + free == snapshots.NODE[name]
            for name, free in node.available_to_us.items()
        )
    codes = {d.reason.code for d in plan(drawn, snapshots.NOW) if isinstance(d, Wait)}
    assert codes >= {"waiting_for_slots", "user_limit", "waiting_for_jobs", "backing_off", "held"}


def test_a_drawn_snapshot_may_be_in_racks_which_some_gangs_require() -> None:
    racked = snapshots.racked(snapshots.drawn(300, num_nodes=20), 0.5)
    assert {job.request.required_level for job in racked.queue} == {None, "rack"}
    codes = {d.reason.code for d in plan(racked, snapshots.NOW) if isinstance(d, Wait)}
    assert codes >= {"waiting_for_slots", "user_limit", "waiting_for_jobs", "backing_off", "held"}


def test_gangs_of_a_drawn_workload_are_nearer_with_a_topology(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(locality, "NUM_JOBS", 60)
    near, far = locality.play(0.6, 0, locality.LEVELS), locality.play(0.6, 0, ())
    assert mean(near.num_racks) < mean(far.num_racks)
    assert len(near.waited_s) == len(far.waited_s) == 60
    assert all(locality.play(0.6, 0, locality.LEVELS, "rack").within["rack"])


def test_a_replay_tells_the_gpus_that_each_round_held(application: traces.Application) -> None:
    jobs = [job(application, gpus=2), job(application, "b", at=61.0)]
    held = replay.replay(jobs, Tiresias())
    assert held[:3] == [2, 2, 3]
    assert sum(held) * replay.ROUND_S == sum(one.gpu_s for one in jobs)


def figures(scale: float) -> measure.Figures:
    slowdown = {"user-0": 2.0 * scale, "user-1": 1.5 * scale}
    return measure.Figures([scale * t for t in (90.0, 700.0, 4000.0)], slowdown, [3, 64, 8] * 10)


def test_plots_have_a_panel_for_each_workload_and_are_kept_beside_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'bench' is not installed")
    from benchmarks.scheduler import pictures

    pairs = {number: measure.Pair(figures(1.0), figures(number)) for number in (1, 2, 3, 4)}
    drawn = pictures.draw(pairs, pairs)
    assert drawn == pictures.draw(pairs, pairs), "the same data gives the same file"
    for picture in drawn:
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture.svg)
        assert {"Tiresias", "dray", *(f"published {number}" for number in pairs)} <= {*texts}
    result = report.Result("plots", "Plots", (), (), (), pictures=drawn)
    page = report.write(result, {"cores": "2"}, "today", tmp_path)
    for picture in drawn:
        assert (tmp_path / f"{picture.name}.svg").read_text() == picture.svg
        assert f"![{picture.caption}]({picture.name}.svg)" in page
    assert "<svg" not in (tmp_path / "plots.json").read_text()


def test_every_plot_of_the_pages_is_there() -> None:
    root = Path(report.__file__).parents[1]
    for page in ("benchmarks/results/README.md", "docs/explanation/scheduling.md"):
        named = re.findall(r"!\[[^]]*\]\(([^)]*\.svg)\)", (root / page).read_text())
        assert named
        assert all(((root / page).parent / name).is_file() for name in named)


@pytest.mark.skipif(measure.data_folder() is None, reason=f"{measure.DATA} names no traces")
def test_the_replay_is_faithful_and_the_default_policy_better() -> None:
    folder = measure.data_folder()
    assert folder is not None
    bench = measure.Bench(folder)
    ratios = []
    for number, rows in workloads.published(folder).items():
        theirs = bench.play(rows, Tiresias(), number).average_s
        assert theirs == pytest.approx(measure.PUBLISHED_S[number], rel=measure.FAITHFUL)
        ratios.append(bench.play(rows, DefaultPolicy(), number).average_s / theirs)
    assert mean(ratios) <= 0.87


def test_users_who_always_have_work_get_the_shares_that_follow_from_their_weights() -> None:
    of = backlog.Backlog(num_users=2, are_recipes=False)
    policy = DrayPolicy(backlog.NUM_GPUS, of.weights)
    until_s = 3 * 86400.0
    played = simulate([], backlog.NUM_GPUS, policy, refill=of.submit(), until_s=until_s)
    held = sum(played.busy_s.values())
    assert 0.9 < held / (backlog.NUM_GPUS * until_s) <= 1.0
    assert played.busy_s["user0"] / held == pytest.approx(1 / 3, rel=0.15)
    waiting = [one for one in played.jobs if one.began_s is None and one.finished_s is None]
    assert len(waiting) >= 2 * (backlog.WAITING - 1)
