"""`dray tensorboard` writes event files that TensorBoard can read, while jobs are running."""

from __future__ import annotations

import errno
import math
import struct
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from dray.tensorboard import event_files
from dray.tensorboard.event_files import records
from dray.tensorboard.writer import DOCUMENT, FILE, EventFile, LogdirInUse
from dray.views import Point
from ray_workers.node.found_metrics.event_files import scalars
from tests.unit.api.serving import LiveServer, wait_until
from tests.unit.cli.running import Cli
from tests.unit.service.helpers import START, metrics


def event_file(logdir: Path) -> Path:
    (found,) = logdir.glob(f"*/{FILE}")
    return found


def written(path: Path) -> list[tuple[str, int, float]]:
    return [
        (point.key, point.step, point.value)
        for _, event in records(path.read_bytes())
        for point in scalars(event)
    ]


def test_the_files_are_read_by_tensorboard(cli: Cli, server: LiveServer, tmp_path: Path) -> None:
    """All scalars with their steps and times, and the document."""
    loader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="the extra 'dev' is not installed: tensorboard, which reads the files back",
    )
    job_id = server.submit(name="digits <b> ü", labels={"team": "vision"})
    at = [START + timedelta(seconds=1.5 * step) for step in range(4)]
    values = {"lr": 0.5, "document": 4.0, "precision, recall": 1.0, 'größe "ä"': 2.0}
    frames = [metrics(n, {"train/loss": 1 / n, **values}, at=at[n]) for n in (1, 2, 3)]
    server.train(job_id, *frames, metrics(3, {"val/loss": math.nan}, at=at[3]))
    server.succeed(job_id)
    assert str(tmp_path) in cli("tensorboard", "--no-serve", "--logdir", str(tmp_path), job_id)
    folder = event_file(tmp_path).parent
    assert folder.name == f"digits_b_-{job_id[-8:]}"
    read = loader.EventAccumulator(str(folder)).Reload()
    tags = read.Tags()
    assert set(tags["scalars"]) == {*values, "train/loss", "val/loss"}
    assert [(e.wall_time, e.step, e.value) for e in read.Scalars("train/loss")] == [
        (at[n].timestamp(), n, struct.unpack("<f", struct.pack("<f", 1 / n))[0]) for n in (1, 2, 3)
    ]
    assert math.isnan(read.Scalars("val/loss")[0].value)
    assert tags["tensors"] == [DOCUMENT]
    assert b'"team": "vision"' in read.Tensors(DOCUMENT)[0].tensor_proto.string_val[0]
    metadata = read.SummaryMetadata(DOCUMENT)
    assert metadata.plugin_data.plugin_name == "text"


def test_a_second_call_goes_on_where_the_first_was_killed(
    cli: Cli, server: LiveServer, tmp_path: Path
) -> None:
    job_id = server.submit(name="resumed")
    server.train(job_id, *(metrics(n, {"loss": 1.0, "lr": 2.0}) for n in range(1, 6)))
    command = [sys.executable, "-m", "dray.cli", "--url", server.url, "tensorboard", "--no-serve"]
    with subprocess.Popen([*command, "--logdir", str(tmp_path), job_id]) as process:
        # By then, it only waits for the next point.
        wait_until(
            lambda: list(tmp_path.glob(f"*/{FILE}")) and len(written(event_file(tmp_path))) == 10,
            "the first points",
        )
        cli("tensorboard", "--no-serve", "--logdir", str(tmp_path), job_id, exits=2)
        assert "another `dray tensorboard` is writing" in cli.err
        process.kill()
    path = event_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-7])
    server.hands.report(job_id, 1, [metrics(6, {"loss": 0.5})])
    server.succeed(job_id)
    for _ in range(2):
        cli("tensorboard", "--no-serve", "--logdir", str(tmp_path), job_id)
        found = written(path)
        wanted = [(key, n, value) for n in range(1, 6) for key, value in (("loss", 1), ("lr", 2))]
        assert sorted(found) == sorted([*wanted, ("loss", 6, 0.5)])


@pytest.mark.parametrize("damage", ["length", "data", "tag"])
def test_a_file_that_is_damaged_is_written_again_from_there(tmp_path: Path, damage: str) -> None:
    points = [Point(key="loss", step=n, value="-Infinity", time=float(n)) for n in range(5)]
    with EventFile(tmp_path) as file:
        for point in points:
            file.write(point)
    path = tmp_path / FILE
    whole = path.read_bytes()
    ends = [end for end, _ in records(whole)]
    spoilt = {
        "length": whole[: ends[3]] + b"\xff" * 100,
        "data": whole[: ends[3] + 12] + b"\0" * (ends[4] - ends[3] - 12) + whole[ends[4] :],
        "tag": whole[: ends[3]] + whole[ends[3] :].replace(b"loss", b"l\xffss"),
    }
    path.write_bytes(spoilt[damage])
    with EventFile(tmp_path) as file:
        assert file.last_steps == {"loss": 2}
        with pytest.raises(LogdirInUse):
            EventFile(tmp_path)
        for point in points[3:]:
            file.write(point)
    assert path.read_bytes() == whole


def test_a_link_to_another_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("of mine")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / FILE).symlink_to(tmp_path / "notes.txt")
    with pytest.raises(OSError, match="symbolic link"):
        EventFile(tmp_path / "job")
    assert (tmp_path / "notes.txt").read_text() == "of mine"


def test_a_disk_that_is_full_ends_the_command_and_not_only_the_writing(
    cli: Cli, server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is still running, so the command would otherwise wait for the next point."""
    monkeypatch.setattr("dray.tensorboard.writer.FLUSH_S", 0.01)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(EventFile, "flush", Mock(side_effect=full))
    job_id = server.submit(name="full")
    server.train(job_id, metrics(1, {"loss": 1.0}))
    cli("tensorboard", "--no-serve", "--logdir", str(tmp_path), job_id, exits=2)
    assert "No space left" in cli.err


def test_numbers_beyond_32_bits_are_infinite(tmp_path: Path) -> None:
    event = event_files.scalars_event(0.0, 300, {"a": 1e300, "b": -1e300})
    assert [point.value for point in scalars(event)] == [math.inf, -math.inf]
    assert event_files.last_steps(event) == {"a": 300, "b": 300}


def test_where_tensorboard_is_not_installed_the_way_to_it_is_named(
    cli: Cli, finished: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cli("tensorboard", "--logdir", str(tmp_path), finished)
    assert f"pip install tensorboard, then tensorboard --logdir {tmp_path}" in cli.err
    assert written(event_file(tmp_path))


def test_tensorboard_is_started_and_its_end_ends_the_command(
    cli: Cli, finished: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake TensorBoard, which ends with a particular code once it finds the file."""
    package = tmp_path / "tensorboard"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text(
        "import pathlib, sys, time\n"
        "logdir = pathlib.Path(sys.argv[sys.argv.index('--logdir') + 1])\n"
        "while not any(path.stat().st_size > 100 for path in logdir.glob('*/*.tfevents.*')):\n"
        "    time.sleep(0.01)\n"
        "sys.exit(7 if sys.argv[-2:] == ['--port', '1234'] else 8)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    logdir = str(tmp_path / "logs")
    cli("tensorboard", "--port", "1234", "--logdir", logdir, finished, exits=7)
