"""`dray.train` as used by a script."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from dray import train
from dray.spec.program.metrics import MetricKey
from dray.train import reporting, saved_files, storage_faults
from dray.train.spool import SpoolWriter, segments
from ray_workers.shared.frame_fields import metric_key


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAY_SPOOL_DIR", str(tmp_path / "spool"))
    monkeypatch.setenv("DRAY_ARTIFACT_URL", (tmp_path / "artifacts").as_uri())
    return tmp_path / "spool"


def written(spool: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for _, path in segments(spool) for line in path.read_text().splitlines()
    ]


def test_a_report_is_one_metrics_frame(spool: Path) -> None:
    train.report(3, {"train/loss": 0.5, "lr": 1}, epoch=1, total_steps=9, samples_per_s=7.5)
    train.report(4, {"train/loss": 0.25})
    first, second = written(spool)
    assert first["kind"] == "metrics"
    assert first["body"] == {
        "step": 3,
        "values": {"train/loss": 0.5, "lr": 1.0},
        "epoch": 1,
        "total_steps": 9,
        "samples_per_s": 7.5,
    }
    assert second["body"] == {"step": 4, "values": {"train/loss": 0.25}}


def test_nan_and_infinity_survive(spool: Path) -> None:
    train.report(1, {"a": math.nan, "b": -math.inf})
    values = written(spool)[0]["body"]["values"]
    assert math.isnan(values["a"])
    assert values["b"] == -math.inf


@pytest.mark.parametrize("key", ["", "x" * 129, "a\n", "\ud800", "@time", 3])
def test_a_key_that_cannot_be_served_is_refused(spool: Path, key: Any) -> None:
    with pytest.raises(ValueError, match="metric key"):
        train.report(1, {key: 1.0})
    assert written(spool) == []


@pytest.mark.parametrize("key", ["train/loss_D", "mAP50(B)", "precision, recall", "é", 'a"b', "/a"])
def test_keys_that_tensorboard_has_are_taken(spool: Path, key: str) -> None:
    train.report(1, {key: 1.0})
    assert written(spool)[0]["body"]["values"] == {key: 1.0}
    assert metric_key(key) == key, "the service takes what the caller may report"
    assert TypeAdapter(MetricKey).validate_python(key) == key


@pytest.mark.parametrize("name", ["step", "epoch", "total_steps"])
def test_counts_beyond_what_is_stored_are_refused(spool: Path, name: str) -> None:
    for wrong in (-1, 2**53 + 1, 2**63, 10**400):
        with pytest.raises(ValueError, match=f"{name} is .*from 0"):
            train.report(**{"step": 1, "values": {"a": 1.0}, name: wrong})
    with pytest.raises(TypeError, match=f"{name} is 1.5"):
        train.report(**{"step": 1, "values": {"a": 1.0}, name: 1.5})
    assert written(spool) == []
    train.report(**{"step": 1, "values": {"a": 1.0}, name: np.int64(2**53)})
    assert written(spool)[0]["body"][name] == 2**53


def test_every_kind_of_real_number_is_taken(spool: Path) -> None:
    values = [True, np.float32(0.5), np.int64(3), Decimal("0.25"), Fraction(1, 2), torch.tensor(2)]
    train.report(
        1, {f"k{at}": value for at, value in enumerate(values)}, samples_per_s=np.float32(7)
    )
    body = written(spool)[0]["body"]
    assert list(body["values"].values()) == [1.0, 0.5, 3.0, 0.25, 0.5, 2.0]
    assert body["samples_per_s"] == 7.0


@pytest.mark.parametrize("value", ["0.5", None, [1.0], 1j, 10**400])
def test_a_value_that_is_no_number_is_refused_by_its_key(spool: Path, value: Any) -> None:
    with pytest.raises(ValueError, match="train/loss"):
        train.report(1, {"train/loss": value})
    assert written(spool) == []


def test_more_names_than_fit_a_step_are_refused_and_none_is_written(spool: Path) -> None:
    names = [f"k{number}" for number in range(100_000)]
    for too_many in (train.MAX_KEYS + 1, len(names)):
        with pytest.raises(
            ValueError,
            match=f"given {too_many} keys, but a step must not have more than {train.MAX_KEYS}",
        ):
            train.report(1, dict.fromkeys(names[:too_many], 1.0))
    assert written(spool) == []
    train.report(1, dict.fromkeys(names[: train.MAX_KEYS], 1.0))
    assert len(written(spool)[0]["body"]["values"]) == train.MAX_KEYS


def test_a_negative_step_is_refused(spool: Path) -> None:
    with pytest.raises(ValueError, match="-1"):
        train.report(-1, {"a": 1.0})


def test_an_artifact_is_copied_hashed_and_told(spool: Path, tmp_path: Path) -> None:
    source = tmp_path / "weights.bin"
    source.write_bytes(b"abc" * 1000)
    saved = train.save_artifact(source, "final/weights.bin")
    copy = tmp_path / "artifacts" / "final" / "weights.bin"
    assert copy.read_bytes() == source.read_bytes()
    assert list(copy.parent.iterdir()) == [copy]
    frame = written(spool)[0]
    assert frame["kind"] == "artifact"
    assert frame["body"] == {
        "path": "final/weights.bin",
        "url": copy.as_uri(),
        "size_bytes": 3000,
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
    }
    assert saved.url == copy.as_uri()


def test_an_artifact_is_noted_beside_the_output_folder_as_it_was_when_it_was_saved(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_OUTPUT_DIR", str(tmp_path / "output"))
    source = tmp_path / "weights.bin"
    source.write_bytes(b"abc")
    train.save_artifact(source)
    assert saved_files.version_of(source.stat()) in saved_files.noted(tmp_path)
    source.write_bytes(b"abcd")
    assert saved_files.version_of(source.stat()) not in saved_files.noted(tmp_path)


def test_artifacts_that_are_too_large_together_are_refused_before_they_are_copied(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holes are counted, because they are stored as zeros."""
    monkeypatch.setattr(reporting, "_saved_bytes", {})
    monkeypatch.setenv("DRAY_OUTPUT_LIMIT_BYTES", "1000000")
    hole, small = tmp_path / "hole", tmp_path / "small"
    with hole.open("wb") as file:
        file.truncate(1 << 40)
    small.write_bytes(bytes(600_000))
    with pytest.raises(
        ValueError, match="the artifact hole has 1,099,511,627,776 bytes; the total size of"
    ):
        train.save_artifact(hole)
    for _ in range(2):  # it replaces itself
        train.save_artifact(small)
    with pytest.raises(ValueError, match="in addition to 600,000 bytes of other artifacts"):
        train.save_artifact(small, "again")
    assert {body["path"] for body in (one["body"] for one in written(spool))} == {"small"}
    assert [path.name for path in (tmp_path / "artifacts").iterdir()] == ["small"]


def test_an_artifact_waits_for_space(
    spool: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(storage_faults, "PAUSE_S", 0.0)
    monkeypatch.setenv("DRAY_ARTIFACT_URL", (tmp_path / "kept").as_uri())
    (tmp_path / "kept").write_text("no folder yet")
    (tmp_path / "model.bin").write_bytes(b"model")

    def make_room() -> None:
        (tmp_path / "kept").unlink(missing_ok=True)

    monkeypatch.setattr(storage_faults.time, "sleep", lambda _: make_room())
    train.save_artifact(tmp_path / "model.bin")
    assert (tmp_path / "kept" / "model.bin").read_bytes() == b"model"
    assert "the artifact model.bin can't be written; retrying for up to" in capsys.readouterr().out


def test_an_artifact_that_finds_no_space_in_time_is_the_storages_fault(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_faults, "WAIT_S", 0.0)
    monkeypatch.setenv("DRAY_ARTIFACT_URL", (tmp_path / "kept").as_uri())
    (tmp_path / "kept").write_text("no folder")
    (tmp_path / "model.bin").write_bytes(b"model")
    with pytest.raises(train.StorageError, match="could not be written within 0 s"):
        train.save_artifact(tmp_path / "model.bin")


def test_an_artifact_is_told_of_though_the_metrics_fill_the_spool(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_SPOOL_LIMIT_BYTES", "1000")
    monkeypatch.setattr("dray.train.spool.SEGMENT_BYTES", 500)
    monkeypatch.setenv("DRAY_ARTIFACT_URL", (tmp_path / "kept").as_uri())
    (tmp_path / "model.bin").write_bytes(b"model")
    for step in range(100):
        train.report(step, {"loss": 1.0})
    assert len(written(spool)) < 100
    train.save_artifact(tmp_path / "model.bin")
    assert written(spool)[-1]["body"]["path"] == "model.bin"


DROPS_REPORTS = """
from dray import train
from dray.train import spool
spool.SEGMENT_BYTES, spool.WAITING_BYTES = 500, 0
append = spool.SpoolWriter._write
spool.SpoolWriter._write = lambda *_: False
for step in range(3):
    train.report(step, {"loss": 1.0})
spool.SpoolWriter._write = append
train.report(3, {"loss": 1.0})
print("goes on")
spool.SpoolWriter._write = lambda *_: False
train.report(4, {"loss": 1.0})
"""


@pytest.mark.parametrize(
    ("waiting_bytes", "kept", "missing"),
    [(0, [3], "3 reports are"), (150, [0, 3], "2 reports are")],
    ids=["none waits", "one waits"],
)
def test_the_log_says_how_many_reports_are_missing(
    spool: Path, waiting_bytes: int, kept: list[int], missing: str
) -> None:
    text = DROPS_REPORTS.replace("500, 0", f"500, {waiting_bytes}")
    done = subprocess.run(
        [sys.executable, "-c", text],
        env=os.environ | {"RANK": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [frame["body"]["step"] for frame in written(spool)] == kept
    assert done.stdout.splitlines() == [
        f"dray: {missing} missing here, because the node of rank 7 had no space for more reports",
        "goes on",
        "dray: 1 report is missing here, because the node of rank 7 had no space for more reports",
    ]


def test_an_artifact_goes_to_any_url_that_fsspec_knows(
    spool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setenv("DRAY_ARTIFACT_URL", "memory://results")
    source = tmp_path / "a.txt"
    source.write_text("hello")
    saved = train.save_artifact(source)
    with fsspec.open(saved.url, "rb") as file:
        assert file.read() == b"hello"
    assert written(spool)[0]["body"]["url"] == "memory://results/a.txt"


@pytest.mark.parametrize("name", ["../up", "/etc/x", "a//b", "a/../b", ".hidden", "", "a b", "a\n"])
def test_an_artifact_cannot_leave_its_folder(spool: Path, tmp_path: Path, name: str) -> None:
    source = tmp_path / "a.txt"
    source.write_text("hello")
    with pytest.raises(ValueError, match="artifact name"):
        train.save_artifact(source, name)


def test_a_missing_artifact_is_named(spool: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.bin"):
        train.save_artifact(tmp_path / "nothing.bin")


def test_outside_of_dray_the_same_script_runs_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("DRAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "a.txt"
    source.write_text("hello")
    train.report(1, {"loss": 1.0})
    assert train.save_artifact(source).url == source.as_uri()
    assert list(tmp_path.iterdir()) == [source]
    assert train.context().job_id is None


def test_the_context_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DRAY_JOB_ID": "j1",
        "DRAY_ATTEMPT": "2",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "DRAY_LOCAL_RANK": "1",
        "DRAY_RESUME_URL": "file:///c",
    }.items():
        monkeypatch.setenv(name, value)
    place = train.context()
    assert (place.job_id, place.attempt, place.rank, place.world_size) == ("j1", 2, 3, 4)
    assert place.local_rank == 1
    assert place.resume_url == "file:///c"


def test_a_helper_process_is_refused_because_a_spool_has_one_writer(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAY_SPOOL_PID", str(os.getpid()))
    code = "from dray import train; train.report(1, {'a': 1.0})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "child of the training process" in ended.stderr
    assert written(spool) == []


def test_a_script_that_only_reports_imports_nothing_heavy() -> None:
    code = (
        "import sys; from dray import train; train.report(1, {'a': 1.0});"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'httpx', 'fsspec') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr


def test_a_signal_handler_that_reports_within_a_report_gets_an_error_and_waits_for_nothing(
    spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = SpoolWriter.append

    def interrupted(self: SpoolWriter, *args: Any, **options: Any) -> bool:
        monkeypatch.undo()
        monkeypatch.setenv("DRAY_SPOOL_DIR", str(spool))
        with pytest.raises(RuntimeError, match="only set a flag"):
            train.report(2, {"a": 2.0})
        return append(self, *args, **options)

    monkeypatch.setattr(SpoolWriter, "append", interrupted)
    train.report(1, {"a": 1.0})
    train.report(3, {"a": 3.0})
    assert [frame["body"]["step"] for frame in written(spool)] == [1, 3]


def test_a_child_that_is_forked_within_a_report_of_another_thread_is_refused(spool: Path) -> None:
    train.report(1, {"a": 1.0})
    with ThreadPoolExecutor(1) as other, reporting._lock:
        forked = other.submit(_report_in_a_child)
        assert os.waitstatus_to_exitcode(os.waitpid(forked.result(), 0)[1]) == 0


def _report_in_a_child() -> int:
    """Return the process id of a child that exits with 0 if it is not allowed to report."""
    owner = str(os.getpid())
    if pid := os.fork():
        return pid
    signal.alarm(60)
    os.environ["DRAY_SPOOL_PID"] = owner
    try:
        train.report(2, {"a": 2.0})
    except RuntimeError:
        os._exit(0)
    os._exit(1)
