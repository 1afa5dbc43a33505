"""The categories of a script's time, based on its calls to `dray.train`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dray import train
from dray.train import files, reporting
from ray_workers.shared import heartbeat
from ray_workers.shared.heartbeat import HeartbeatPage, RankObservation, RankPhase, TimeCategory
from ray_workers.supervision.rules.slot_time import SlotTimeLedger
from ray_workers.training.core.script_time import ScriptTime


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        heartbeat, "time", SimpleNamespace(monotonic=clock.monotonic, time=lambda: 1e9 + clock.now)
    )
    return clock


class Script:
    """An observed script, with a page that others can read."""

    def __init__(self, folder: Path, clock: Clock, *, furthest_step: int = 0) -> None:
        self.folder = folder / "pages"
        self.clock = clock
        page = HeartbeatPage(heartbeat.page_path(heartbeat.prefix_of(self.folder, 0, 0)))
        self.time = ScriptTime(page, furthest_step)
        train.observe(self.time)

    def takes(self, seconds: float) -> None:
        self.clock.now += seconds

    def reports(self, *steps: int, each_s: float = 1.0) -> None:
        for step in steps:
            self.takes(each_s)
            train.report(step, {"train/loss": 1.0})

    def raises(self, error: BaseException, *, after_s: float) -> None:
        with self.time.running():
            self.reports(1, 2)
            self.takes(after_s)
            raise error

    @property
    def observation(self) -> RankObservation:
        (observation,) = heartbeat.observe_ranks(self.folder)
        return observation

    @property
    def books(self) -> dict[str, float]:
        return {use.value: s for use, s in self.observation.status.uses.items() if s}


@pytest.fixture
def script(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(reporting, "_job_checkpoints", None)
    monkeypatch.setattr(reporting.atexit, "register", lambda *_: None)
    for name in ("DRAY_SPOOL_PID", "DRAY_RESUME_FROM", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.setenv("DRAY_CHECKPOINT_URL", (tmp_path / "checkpoints").as_uri())
    monkeypatch.setenv("DRAY_ARTIFACT_URL", (tmp_path / "artifacts").as_uri())
    yield Script(tmp_path, clock)
    monkeypatch.setattr(reporting, "_observer", None)


def test_steps_are_useful_and_what_comes_after_the_last_report_of_a_script_that_ends_well(
    script: Script,
) -> None:
    with script.time.running():
        script.takes(3.0)
        script.reports(0, 1, 2)
        assert script.observation.status.first_at > 0
        script.takes(5.0)
    assert script.books == {"unreported": 4.0, "useful": 7.0}
    assert script.observation.status.phase is RankPhase.FINISH


@pytest.mark.parametrize("code", [None, 0])
def test_a_script_that_exits_without_an_error_ends_well(script: Script, code: int | None) -> None:
    with pytest.raises(SystemExit):
        script.raises(SystemExit(code), after_s=2.0)
    assert script.books == {"unreported": 1.0, "useful": 3.0}


@pytest.mark.parametrize("error", [ValueError("loss is NaN"), SystemExit(143), SystemExit("")])
def test_the_step_in_which_a_script_fails_is_of_no_use(
    script: Script, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        script.raises(error, after_s=60.0)
    assert script.books == {"unreported": 1.0, "useful": 1.0}


def test_steps_that_an_earlier_attempt_reported_are_recomputed(
    tmp_path: Path, script: Script, clock: Clock
) -> None:
    resumed = Script(tmp_path / "resumed", clock, furthest_step=25)
    with resumed.time.running():
        resumed.reports(*range(21, 31))
    assert resumed.books == {"unreported": 1.0, "recomputed": 4.0, "useful": 5.0}


def test_a_step_that_comes_twice_or_goes_back_counts_as_the_script_goes_on(script: Script) -> None:
    with script.time.running():
        script.reports(1, 2, 2, 1, 2**53, 2, each_s=1.0)
    assert script.books == {"unreported": 1.0, "useful": 5.0}
    assert script.observation.status.step == 2


def test_saving_and_loading_hold_a_script_up(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(*arguments: object) -> tuple[int, str]:
        script.takes(10.0)
        return 1, "0" * 64

    monkeypatch.setattr(files, "store", slowly)
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "weights").write_bytes(b"w")
    with script.time.running():
        assert train.load_checkpoint() is None
        script.reports(1)
        train.save_checkpoint(folder, 1)  # the file and the manifest
        script.takes(2.0)
        train.save_artifact(folder / "weights")
    assert script.books == {"unreported": 1.0, "checkpointing": 30.0, "useful": 2.0}


def test_saving_in_another_thread_holds_nothing_up(script: Script) -> None:
    def save() -> None:
        with script.time.storing():
            script.takes(10.0)

    with script.time.running():
        script.reports(1)
        saver = threading.Thread(target=save)
        saver.start()
        saver.join()
        script.reports(2)
    assert script.books == {"unreported": 1.0, "useful": 11.0}


def test_a_call_amidst_another_one_books_nothing_and_waits_for_nothing(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> float:
        """Save as in a signal handler that runs while the script is reporting."""
        script.clock.now += 1.0
        with script.time.storing():
            script.clock.now += 1.0
        return script.clock.now

    with script.time.running():
        script.reports(1)
        with monkeypatch.context() as patch:
            patch.setattr(heartbeat.time, "monotonic", interrupted)
            script.time.stepped(2)
        script.takes(3.0)
    assert script.books == {"unreported": 1.0, "useful": 5.0}


def test_a_forked_process_books_nothing(script: Script) -> None:
    with script.time.running():
        script.reports(1)
        child = os.fork()
        if not child:
            try:
                script.takes(100.0)
                script.time.stepped(9)
                with script.time.storing(), script.time.running():
                    script.takes(100.0)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert script.observation.status.step == 1
        script.reports(2)
    assert script.books == {"unreported": 1.0, "useful": 1.0}


def test_a_script_that_reports_nothing_is_unreported_as_long_as_it_runs(script: Script) -> None:
    ledger = SlotTimeLedger()
    ledger.hold(1, script.clock.now)
    with script.time.running():
        script.takes(7.0)
        ledger.hold(1, script.clock.now)
        books = ledger.account([script.observation], TimeCategory.UNREPORTED)
        assert {name: s for name, s in books.items() if s} == {"unreported": 7.0}
