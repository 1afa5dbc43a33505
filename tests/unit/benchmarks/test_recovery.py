"""The time of a recovery follows from the commits, and is read from logs and pages alike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.machine import ROOT
from benchmarks.pages import SeenCommits, newest
from benchmarks.recovery import commits, contenders, measure, work
from benchmarks.recovery.commits import Commit, CommitLog, Recovery
from benchmarks.recovery.plain import Samples
from dray.spec import JobSpec
from ray_workers.shared import heartbeat
from ray_workers.shared.heartbeat import HeartbeatPage, RankPhase, TimeCategory

KILLED_AT = 100.0


def commit(rank: int, process: str, step: int, at: float, generation: int = 0) -> Commit:
    return Commit(rank, process, generation, step, at)


def recovered(*found: Commit) -> Recovery | None:
    return commits.recovery(found, killed_at=KILLED_AT, killed_rank=1)


BEFORE = (commit(0, "a", 50, 99.9), commit(1, "b", 50, 99.9))


def test_a_step_of_the_broken_group_is_no_recovery_but_a_step_that_may_be_lost() -> None:
    last = commit(0, "a", 51, 100.01)
    assert recovered(*BEFORE, last) is None
    found = recovered(*BEFORE, last, commit(1, "c", 51, 100.5), commit(1, "c", 52, 100.6))
    assert found is not None
    assert found.next_s == pytest.approx(0.5)
    assert found.steps_lost == 1
    assert found.caught_up_s == pytest.approx(0.6)


def test_a_group_that_keeps_its_state_loses_no_step_and_is_whole_at_once() -> None:
    mended = commit(0, "a", 51, 100.25, generation=1), commit(1, "c", 51, 100.5, generation=1)
    found = recovered(*BEFORE, *mended)
    assert found is not None
    assert found == Recovery(0.25, 0, 0.25, 0.5)


def test_a_group_that_goes_back_is_at_the_step_reached_only_later() -> None:
    again = [commit(rank, "new", 41 + n, 104 + n / 2) for n in range(12) for rank in (0, 1)]
    assert recovered(*BEFORE, *again) == Recovery(4.0, 10, 9.0, 4.0)


def test_a_survivor_that_trains_on_alone_is_not_whole() -> None:
    found = recovered(*BEFORE, commit(0, "a", 51, 101.0, generation=2))
    assert found == Recovery(1.0, 0, 1.0, None)
    assert commits.lost_of_a_minute([found]) is None


@pytest.mark.parametrize(
    ("recovery", "share"),
    [
        (Recovery(0.6, 0, 0.6, 0.6), 0.01),
        (Recovery(3.0, 30, 6.0, 3.0), 0.1),  # what it had done counts when it is done again
        (Recovery(1.0, 0, 1.0, 5.0), 0.05),  # one of two ranks idles from 1 to 5
    ],
)
def test_what_a_kill_takes_of_a_minute(recovery: Recovery, share: float) -> None:
    assert commits.lost_of_a_minute([recovery]) == pytest.approx(share)


def test_a_log_is_read_as_it_was_written_but_for_a_line_that_is_not_whole(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, rank=1)
    log.committed(1)
    log.committed(2, generation=7)
    path = next(tmp_path.iterdir())
    with path.open("a") as file:
        file.write("7 3 17")
    found = commits.read(tmp_path)
    assert [(c.rank, c.generation, c.step) for c in found] == [(1, 0, 1), (1, 7, 2)]
    assert {c.process for c in found} == {str(os.getpid())}
    assert found[0].at <= found[1].at
    assert commits.read(tmp_path, rank=0) == []
    assert commits.read(tmp_path, rank=1) == found


def test_the_commits_of_a_rank_are_seen_on_its_page_through_two_generations(
    tmp_path: Path,
) -> None:
    page = HeartbeatPage(heartbeat.page_path(heartbeat.prefix_of(tmp_path, 0, 0)))
    seen = SeenCommits()
    page.begin(0, 0)
    seen.take(heartbeat.observe_ranks(tmp_path), at=1.0)
    assert seen.commits == []
    page.commit(1)
    page.commit(2)
    seen.take(heartbeat.observe_ranks(tmp_path), at=2.0)
    seen.take(heartbeat.observe_ranks(tmp_path), at=3.0)
    page.enter(RankPhase.STANDBY, TimeCategory.RECOVERING)
    page.begin(1, 2)
    seen.take(heartbeat.observe_ranks(tmp_path), at=4.0)
    page.commit(3)
    (observation,) = heartbeat.observe_ranks(tmp_path)
    seen.take([observation], at=5.0)
    assert [(c.generation, c.step) for c in seen.commits] == [(0, 1), (0, 2), (1, 3)]
    assert seen.commits[1].at == 2.0
    assert seen.commits[2].at == observation.status.first_at
    assert newest([observation], 0) == observation
    assert newest([observation], 1) is None


def test_the_peers_split_the_same_batches_and_the_document_is_a_valid_job() -> None:
    document = JobSpec.model_validate(work.job())
    assert document.train.global_batch_size == work.GLOBAL_BATCH_SIZE
    assert document.checkpoint.every_steps == work.SAVE_EVERY_STEPS
    assert work.KILL_AT_STEP % work.SAVE_EVERY_STEPS, "a kill at a checkpoint would lose nothing"
    samples = Samples()
    whole = samples.of(3, 0, 1)[0]
    parts = [samples.of(3, rank, 2)[0] for rank in range(2)]
    torch.testing.assert_close(torch.stack(parts, 1).flatten(0, 1), whole)


def test_the_peers_scripts_import_nothing_of_dray() -> None:
    code = (
        "import sys, benchmarks.recovery.plain\n"
        "print([n for n in sys.modules if n.split('.')[0] in ('dray', 'ray_workers', 'ray')])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "[]"


def samples(next_s: list[float], steps_lost: int = 0) -> measure.Samples:
    return measure.Samples([Recovery(t, steps_lost, 2 * t, t) for t in next_s], [0.0] * len(next_s))


def test_goals_are_met_by_the_figures_alone() -> None:
    taken = {
        measure.KILL: samples([0.4, 0.5, 0.6]),
        measure.SCRIPT: samples([0.7, 0.8, 0.9]),
        measure.RAY_TRAIN: samples([8.0, 9.0, 10.0], steps_lost=30),
        measure.TORCHRUN: samples([3.9, 4.0, 4.1], steps_lost=10),
        measure.DRILL: measure.Samples([Recovery(1.5, 0)] * 2, [0.0] * 2),
    }
    result = measure.conclude(taken)
    met = {each.label: each.met for each in result.comparisons}
    assert met[f"next step, {measure.KILL} / {measure.RAY_TRAIN}"]
    assert not met[f"next step, {measure.KILL} / {measure.TORCHRUN}"]
    assert met[f"next step, {measure.SCRIPT} / {measure.RAY_TRAIN}"]
    assert met[f"next step, {measure.KILL} / one second"]
    assert not met[f"next step, {measure.DRILL} / one second"]
    assert "torchft is not installed" in result.method[-1]
    rows = {row[0]: list(row[1:]) for row in result.tables[0].rows}
    assert rows[measure.RAY_TRAIN] == ["30 (30)", "18 s", "9 s", "70.0%", "0"]
    assert rows[measure.DRILL] == ["0 (0)", "not seen", "not seen", "not seen", "0"]


def test_a_contender_that_ends_by_itself_is_an_error(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], text=True) as process:
        process.wait()
        with pytest.raises(contenders.BenchmarkError, match="exited with code 3"):
            contenders._kill_logged(tmp_path, process)


def test_waiting_in_vain_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(contenders, "TURN_TIMEOUT_S", 0.02)
    with pytest.raises(contenders.BenchmarkError, match="timed out after"):
        contenders._kill_logged(tmp_path)
