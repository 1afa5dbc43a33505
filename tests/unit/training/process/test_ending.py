"""When a rank ends, an error caused by the end of another rank is marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from ray_workers.shared.contracts import Cause
from ray_workers.training.core.errors import PartsLostError, cause_of
from ray_workers.training.core.failure_reason import MAX_CHARS
from ray_workers.training.process.ending import CONSEQUENCE, RankEnd
from tests.unit.training.ranks import frames, make_task

SPEC = {"script": {"entrypoint": "a.py"}}
GONE = "Connection closed by peer [127.0.0.1]:4711"


def end(folder: Path, error: BaseException, world_size: int) -> dict[str, object]:
    """Return the ERROR frame after an error."""
    task = make_task(folder, SPEC, world_size=world_size)
    rank = RankEnd(task, cause_of, str, has_code=False)
    if isinstance(error, SystemExit):
        rank.after_exit(error)
    else:
        rank.after_error(error)
    (frame,) = frames(folder, kind="error")
    return frame


@pytest.fixture(autouse=True)
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAY_SPOOL_PID", raising=False)
    task = make_task(tmp_path, SPEC, world_size=2)
    monkeypatch.setenv("DRAY_SPOOL_DIR", task.spool_dir)


def _exit_after(error: Exception) -> SystemExit:
    try:
        try:
            raise error
        except RuntimeError:
            raise SystemExit(3)  # noqa: B904
    except SystemExit as leaving:
        return leaving


@pytest.mark.parametrize("error", [RuntimeError(GONE), _exit_after(RuntimeError(GONE))])
def test_the_error_of_a_survivor_is_marked_in_the_log_and_in_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: BaseException
) -> None:
    frame = end(tmp_path, error, world_size=2)
    assert frame["cause"] == Cause.WORKER_LOST
    assert str(frame["message"]).endswith(f"; {CONSEQUENCE}")
    assert capfd.readouterr().err.endswith(f"dray: the error above is {CONSEQUENCE}\n")


@pytest.mark.parametrize(
    ("error", "world_size"),
    [(ValueError("no"), 2), (RuntimeError(GONE), 1), (PartsLostError(), 2)],
    ids=["own", "alone", "ours"],
)
def test_no_other_error_is_marked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], error: BaseException, world_size: int
) -> None:
    frame = end(tmp_path, error, world_size)
    assert CONSEQUENCE not in f"{frame['message']}{capfd.readouterr().err}"


def test_the_mark_of_a_long_reason_is_whole(tmp_path: Path) -> None:
    errors = [RuntimeError(f"{GONE} {'x' * MAX_CHARS}") for _ in range(3)]
    errors[0].__cause__ = errors[1]
    message = str(end(tmp_path, errors[0], 2)["message"])
    assert message.endswith(CONSEQUENCE)
    assert len(message) <= MAX_CHARS
