"""Saves run during training, one at a time; they are reported when committed, and never end the
job."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dray.train.checkpoints import CheckpointRef
from dray.train.spool import begin_count, note_known, segments
from ray_workers.training.checkpoint import checkpoint_files, direct_io, manifests
from ray_workers.training.checkpoint.manager import NICENESS, CheckpointManager
from ray_workers.training.checkpoint.manifests import CheckpointMetadata
from ray_workers.training.core.faultpoints import FaultPoint, arm, disarm
from tests.unit.training.ranks import frames

POSITION = {"epoch": 0}
NUM = 300_000
"""Number of floats in a tensor that is too large to be copied immediately."""


@pytest.fixture(autouse=True)
def _spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path / "attempt-1" / "spool" / "r0.0.metrics"))


@pytest.fixture
def manager(tmp_path: Path) -> CheckpointManager:
    return CheckpointManager((tmp_path / "checkpoints").as_uri(), keep=9, best=None)


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    disarm()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Writes wait until this event is set."""
    opened = threading.Event()

    def wait() -> None:
        assert opened.wait(30.0)

    arm(FaultPoint.BEFORE_WRITE, wait)
    yield opened
    opened.set()


def about(step: int, **metrics: float) -> CheckpointMetadata:
    return CheckpointMetadata(step, metrics, POSITION)


def told(home: Path) -> list[tuple[str, int]]:
    return [(f["kind"], f["body"]["step"]) for f in frames(home)]


def saved_state(home: Path, number: int = -1) -> Any:
    body = frames(home, kind="checkpoint")[number]
    return checkpoint_files.load(
        CheckpointRef(body["url"], body["step"], body["manifest_sha256"])
    ).state


def test_a_checkpoint_is_the_state_as_it_was_when_the_save_began(
    tmp_path: Path, manager: CheckpointManager
) -> None:
    weights, buffer = torch.zeros(NUM), torch.zeros(3)
    manager.save(about(1), {"w": weights, "b": buffer}, volatile=[buffer])
    buffer += 1  # like a forward pass
    manager.hold()
    weights += 1  # like an optimizer step
    manager.wait()
    state = saved_state(tmp_path)
    assert torch.equal(state["w"], torch.zeros(NUM))
    assert torch.equal(state["b"], torch.zeros(3))


def test_training_goes_on_while_it_is_written_and_it_is_told_when_it_is_committed(
    tmp_path: Path, manager: CheckpointManager, gate: threading.Event
) -> None:
    manager.save(about(1), {"w": torch.zeros(NUM)})
    manager.hold()
    assert manager.is_saving
    assert not (tmp_path / "attempt-1").exists(), "nothing was reported yet"
    gate.set()
    manager.wait()
    assert not manager.is_saving
    assert manager.write_s > 0.0
    assert told(tmp_path) == [("checkpoint", 1)]


def test_one_that_is_due_while_another_is_written_waits_for_it_and_says_so(
    tmp_path: Path,
    manager: CheckpointManager,
    gate: threading.Event,
    capsys: pytest.CaptureFixture[str],
) -> None:
    manager.save(about(1), {"w": torch.full((NUM,), 1.0)})
    second = threading.Thread(target=manager.save, args=(about(2), {"w": torch.full((NUM,), 2.0)}))
    second.start()
    said = ""
    while "step 2 is due, but must wait until the checkpoint of step 1 is written" not in said:
        assert second.is_alive(), "it did not wait"
        time.sleep(0.01)
        said += capsys.readouterr().out
    gate.set()
    second.join(30.0)
    manager.wait()
    assert told(tmp_path) == [("checkpoint", 1), ("checkpoint", 2)]
    for number in (0, 1):
        assert torch.equal(saved_state(tmp_path, number)["w"], torch.full((NUM,), number + 1.0))


def test_a_full_disk_ends_the_checkpoint_and_not_the_job(
    tmp_path: Path,
    manager: CheckpointManager,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fill_up() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    arm(FaultPoint.BEFORE_MANIFEST, fill_up, at_step=2)
    for step in (1, 2):
        manager.save(about(step), {"w": torch.ones(NUM)})
        manager.wait()
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert left == ["step-000000000001"], "what was written of it is gone"
    out = capsys.readouterr().out
    assert "the checkpoint of step 2 could not be saved" in out
    assert "No space left on device" in out
    manager.save(about(3), {"w": torch.ones(NUM)})
    manager.wait()
    assert told(tmp_path) == [("checkpoint", 1), ("checkpoint", 3)]


def test_a_folder_that_can_not_be_written_ends_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    manager = CheckpointManager((tmp_path / "file" / "checkpoints").as_uri(), keep=1, best=None)
    manager.save(about(1), {"w": torch.ones(NUM)})
    manager.wait()
    assert "could not be saved: [Errno 20] Not a directory" in capsys.readouterr().out


def test_a_state_that_no_checkpoint_holds_ends_the_checkpoint(
    manager: CheckpointManager, capsys: pytest.CaptureFixture[str]
) -> None:
    manager.save(about(1), {"w": torch.ones(3, dtype=torch.complex64)})
    manager.save(about(2), {"w": object()})
    manager.wait()
    out = capsys.readouterr().out
    assert "step 1 could not be saved: w has the type torch.complex64" in out
    assert "step 2 could not be saved: w is a object" in out


def test_memory_is_kept_for_the_next_save_and_follows_the_state(
    tmp_path: Path, manager: CheckpointManager
) -> None:
    sizes = [NUM, NUM, 2 * NUM, 7]
    for step, size in enumerate(sizes):
        manager.save(about(step), {"w": torch.full((size,), float(step)), "step": step})
        manager.wait()
    for number, size in enumerate(sizes):
        state = saved_state(tmp_path, number)
        assert torch.equal(state["w"], torch.full((size,), float(number)))
        assert state["step"] == number


def test_a_step_that_is_saved_or_being_saved_is_not_saved_over(
    tmp_path: Path, manager: CheckpointManager, gate: threading.Event
) -> None:
    """If a step is repeated after a loss, its checkpoint already exists."""
    manager.save(about(1), {"w": torch.full((3,), 1.0)})
    manager.save(about(1), {"w": torch.full((3,), 2.0)})
    gate.set()
    manager.wait()
    manager.save(about(1), {"w": torch.full((3,), 3.0)})
    manager.wait()
    assert told(tmp_path) == [("checkpoint", 1)]
    assert torch.equal(saved_state(tmp_path)["w"], torch.full((3,), 1.0))


def test_what_is_superseded_is_deleted_also_of_an_earlier_attempt_and_told(
    tmp_path: Path,
) -> None:
    earlier = [
        checkpoint_files.save((tmp_path / "attempt-0").as_uri(), about(step), {"w": torch.ones(1)})
        for step in (10, 5)
    ]
    manager = CheckpointManager((tmp_path / "attempt-1").as_uri(), keep=2, best=None)
    manager.adopt([CheckpointRef(one.url, one.step, one.manifest_sha256) for one in earlier])
    for step in (15, 20):
        manager.save(about(step, **{"val/loss": 1.0}), {"w": torch.ones(1)})
    manager.wait()
    assert told(tmp_path) == [
        ("checkpoint", 15),
        ("checkpoint_dropped", 5),
        ("checkpoint", 20),
        ("checkpoint_dropped", 10),
    ]
    assert not Path(earlier[0].url.removeprefix("file://")).exists()
    body = frames(tmp_path, kind="checkpoint")[0]
    loaded = checkpoint_files.load(CheckpointRef(body["url"], 15, body["manifest_sha256"]))
    assert loaded.saved.size_bytes == body["size_bytes"]
    assert body["metrics"] == {"val/loss": 1.0}


def test_what_the_service_knows_of_stays_until_it_knows_of_what_is_newer(tmp_path: Path) -> None:
    """Unreported checkpoints of a lost node could not be found again."""
    own = Path(os.environ["DRAY_SPOOL_DIR"])
    begin_count(own)
    earlier = checkpoint_files.save(
        (tmp_path / "attempt-0").as_uri(), about(5), {"w": torch.ones(1)}
    )
    manager = CheckpointManager((tmp_path / "attempt-1").as_uri(), keep=1, best=None)
    manager.adopt([CheckpointRef(earlier.url, earlier.step, earlier.manifest_sha256)])
    for step in (10, 15, 20):
        manager.save(about(step), {"w": torch.ones(1)})
    manager.wait()
    dropped = [step for kind, step in told(tmp_path) if kind == "checkpoint_dropped"]
    assert dropped == [10, 15], "only unreported checkpoints are dropped"
    size = sum(path.stat().st_size for _, path in segments(own))
    note_known(own, size, size)
    manager.tidy()
    dropped = [step for kind, step in told(tmp_path) if kind == "checkpoint_dropped"]
    assert dropped == [10, 15, 5]


def test_the_end_waits_for_nobody_if_nothing_is_superseded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_count(Path(os.environ["DRAY_SPOOL_DIR"]))
    monkeypatch.setattr("dray.train.checkpoints.KNOWN_WITHIN_S", math.inf)
    manager = CheckpointManager((tmp_path / "attempt-1").as_uri(), keep=2, best=None)
    for step in (5, 10):
        manager.save(about(step), {"w": torch.ones(1)})
    manager.wait()
    manager.tidy()
    assert "checkpoint_dropped" not in [kind for kind, _ in told(tmp_path)]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_what_a_dead_attempt_was_writing_is_deleted_and_what_it_committed_is_kept(
    tmp_path: Path, scheme: str
) -> None:
    base = (tmp_path / "a").as_uri() if scheme == "file" else f"memory://{tmp_path.name}/a"
    saved = checkpoint_files.save(base, about(5), {"w": torch.ones(1)})
    content = memoryview(b"torn")
    direct_io.write_buffer(f"{manifests.url_of(base, 6)}/.state.partial", content, 4)
    manager = CheckpointManager(f"{base}-next", keep=9, best=None)
    ref = CheckpointRef(saved.url, 5, saved.manifest_sha256)
    manager.adopt([ref])
    manager.save(about(7), {"w": torch.ones(1)})
    manager.wait()
    assert direct_io.folders(base) == [saved.url]
    assert checkpoint_files.load(ref).saved.step == 5
    assert direct_io.folders(f"{base}-none") == []


def test_who_stands_in_for_a_dead_rank_0_keeps_what_the_service_may_know(tmp_path: Path) -> None:
    """The service may know any of the adopted checkpoints."""
    base = (tmp_path / "checkpoints").as_uri()
    for step in (5, 10):
        checkpoint_files.save(base, about(step), {"w": torch.ones(1)})
    own = Path(os.environ["DRAY_SPOOL_DIR"])
    begin_count(own)
    manager = CheckpointManager(base, keep=1, best=None)
    manager.adopt_own()
    for step in (15, 20):
        manager.save(about(step), {"w": torch.ones(1)})
    manager.wait()
    dropped = [step for kind, step in told(tmp_path) if kind == "checkpoint_dropped"]
    assert dropped == [15]
    size = sum(path.stat().st_size for _, path in segments(own))
    note_known(own, size, size)
    manager.tidy()
    assert [one.step for one in checkpoint_files.committed(base)] == [20]


def test_who_stands_in_for_a_dead_rank_0_goes_on_with_its_checkpoints(tmp_path: Path) -> None:
    base = (tmp_path / "checkpoints").as_uri()
    for step in (5, 10):
        checkpoint_files.save(base, about(step), {"w": torch.full((1,), float(step))})
    direct_io.write_buffer(f"{manifests.url_of(base, 15)}/.state.1.partial", memoryview(b"t"), 1)
    (tmp_path / "checkpoints" / "other").mkdir()
    manager = CheckpointManager(base, keep=2, best=None)
    manager.adopt_own()
    assert told(tmp_path) == [("checkpoint", 10)], "the newest may not have been reported"
    assert manager.has(10)
    manager.save(about(10), {"w": torch.zeros(1)})
    manager.save(about(15), {"w": torch.full((1,), 15.0)})
    manager.wait()
    assert told(tmp_path)[1:] == [("checkpoint", 15), ("checkpoint_dropped", 5)]
    assert saved_state(tmp_path, 0)["w"] == 10.0
    left = [path.name for path in Path(manifests.url_of(base, 15)[7:]).iterdir()]
    assert sorted(left) == ["manifest.json", "state.json", "state.safetensors"]


def test_a_file_system_without_direct_writes_gets_them_through_its_cache(
    tmp_path: Path, manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, refused = os.write, []

    def refuse_direct(fd: int, data: memoryview) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & direct_io.DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(fd, data)

    monkeypatch.setattr(os, "write", refuse_direct)
    weights = torch.arange(3_000_001.0)
    manager.save(about(1), {"w": weights})
    manager.wait()
    assert bool(refused) == bool(direct_io.DIRECT)
    assert torch.equal(saved_state(tmp_path)["w"], weights)


def test_the_writing_thread_stands_back_and_no_other(manager: CheckpointManager) -> None:
    if sys.platform != "linux":
        pytest.skip("threads have a niceness of their own on Linux")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    manager.save(about(1), {"w": torch.ones(1)})
    manager.wait()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    (writer,) = [t for t in threading.enumerate() if t.name.startswith("dray-checkpoint")][-1:]
    assert writer.native_id is not None
    assert os.getpriority(os.PRIO_PROCESS, writer.native_id) == NICENESS


def test_waiting_without_a_save_returns_at_once(manager: CheckpointManager) -> None:
    manager.hold()
    manager.wait()
    assert manager.write_s == 0.0
