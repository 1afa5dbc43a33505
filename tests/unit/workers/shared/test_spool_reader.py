"""Each frame of a spool is read once, whole and in order, however the reads are split."""

from __future__ import annotations

import errno
import math
import os
import random
from pathlib import Path

import pytest

from dray.train import spool
from dray.train.spool import SpoolWriter, segments
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import FrameKind

SEGMENT_BYTES = 300
KEY = spool_reader.spool_key(3, 1, "metrics")


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "SEGMENT_BYTES", SEGMENT_BYTES)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "job" / "1" / KEY


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for _, path in segments(directory))


def numbers(data: bytes) -> list[int]:
    return [frame.body["n"] for frame in spool_reader.decode(KEY, data)]


def read_all(directory: Path, offset: int = 0, max_bytes: int = 1 << 20) -> bytes:
    data = b""
    while chunk := spool_reader.read(directory, offset + len(data), max_bytes):
        data += chunk
    return data


def append(writer: SpoolWriter, n: int, filling: int = 0) -> bool:
    return writer.append(FrameKind.METRICS, {"n": n, "filling": "x" * filling})


def test_the_writer_sees_how_far_the_service_knows_it(directory: Path) -> None:
    writer = SpoolWriter(directory, limit_bytes=1 << 30)

    def ask(stored: int) -> tuple[float, float]:
        spool_reader.acknowledge(directory.parent, [KEY], {KEY: stored})
        spool_reader.read_all(directory.parent, [KEY], {KEY: stored}, 1 << 20)
        return spool.known(directory)

    append(writer, 1)
    first = writer.position
    assert ask(first) == (math.inf, math.inf), "nobody counts"
    spool.begin_count(directory)
    assert spool.known(directory) == (0, 0)
    assert ask(0) == (0, first)
    append(writer, 2)
    assert ask(first) == (first, writer.position)
    assert ask(0)[0] == first, "an older question takes nothing back"
    spool.begin_count(directory)
    assert spool.known(directory)[0] == first


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_of_writes_reads_and_discards_delivers_each_frame_once(
    directory: Path, seed: int
) -> None:
    chance = random.Random(seed)
    writer = SpoolWriter(directory, limit_bytes=1 << 30)
    offset, written = 0, 0
    found: list[int] = []
    while written < 150 or len(found) < written:
        if written < 150 and chance.random() < 0.6:
            assert append(writer, written, chance.choice([0, 10, 100, 700]))
            written += 1
        if chance.random() < 0.4:
            max_bytes = chance.choice([1, 50, 333, 5000])
            chunk = spool_reader.read(directory, offset, max_bytes)
            assert chunk == spool_reader.read(directory, offset, max_bytes)
            assert len(chunk) <= max_bytes or chunk.count(b"\n") == 1
            assert bool(chunk) == spool_reader.has_more(directory, offset)
            found += numbers(chunk)
            offset += len(chunk)
        if chance.random() < 0.3:
            spool_reader.discard(directory, before=offset)
    assert found == list(range(150))
    assert not spool_reader.has_more(directory, offset)


def test_lines_that_are_no_frames_are_skipped() -> None:
    frame = b'{"kind": "log", "time": 1.0, "body": {"line": 0, "text": "x"}}\n'
    others = [
        b"nonsense",
        b'{"kind": "log", "time": 1' + b"0" * 400 + b', "body": {}}',
        b'{"kind": "log", "time": 1.0, "body": ' + b"[" * 50_000,
        b'{"kind": "log", "time": 1.0, "body": {"a": ' + b"[" * 90 + b"]" * 90 + b"}}",
    ]
    data = b"".join(line + b"\n" for line in others) + frame
    assert len(list(spool_reader.decode("r0.0.log", data))) == 1


def test_spools_are_quiet_since_the_newest_of_their_frames(tmp_path: Path) -> None:
    spools = [tmp_path / "a", tmp_path / "b"]
    assert spool_reader.quiet_s(spools, 5000.0) == 0.0, "nothing was written yet"
    for at, spool_directory in zip((4000, 4600), spools, strict=True):
        writer = SpoolWriter(spool_directory, limit_bytes=1 << 30)
        append(writer, 1)
        writer.close()
        for path in spool_directory.iterdir():
            os.utime(path, (at, at))
    assert spool_reader.quiet_s(spools, 5000.0) == 400.0
    assert spool_reader.quiet_s(spools, 4500.0) == 0.0, "the clock was put back"


@pytest.mark.parametrize("max_bytes", [1, 7, 64, SEGMENT_BYTES, 10_000])
def test_the_byte_cap_only_splits_between_frames(directory: Path, max_bytes: int) -> None:
    writer = SpoolWriter(directory, limit_bytes=1 << 30)
    for n in range(30):
        append(writer, n, n * 20)
    assert numbers(read_all(directory, max_bytes=max_bytes)) == list(range(30))


def test_discarding_what_was_delivered_keeps_all_that_was_not(directory: Path) -> None:
    writer = SpoolWriter(directory, limit_bytes=1 << 30)
    for n in range(40):
        append(writer, n, 30)
    whole = read_all(directory)
    before = len(segments(directory))
    offset = 0
    for line in whole.splitlines(keepends=True):
        offset += len(line)
        spool_reader.discard(directory, before=offset)
        assert read_all(directory, offset) == whole[offset:]
    assert len(segments(directory)) == 1 < before


def test_what_the_writer_adds_after_a_discard_is_read_on_from_the_same_offset(
    directory: Path,
) -> None:
    writer = SpoolWriter(directory, limit_bytes=1 << 30)
    for n in range(20):
        append(writer, n, 50)
    offset = len(read_all(directory))
    spool_reader.discard(directory, before=offset)
    for n in range(20, 40):
        append(writer, n, 50)
    assert numbers(read_all(directory, offset)) == list(range(20, 40))


def test_a_writer_that_was_closed_writes_on(directory: Path) -> None:
    """A report at the end of a process may follow after the spool was closed."""
    writer = SpoolWriter(directory, limit_bytes=1 << 30)
    writer.close()
    for n in range(3):
        append(writer, n)
        writer.close()
    assert numbers(read_all(directory)) == [0, 1, 2]


def test_an_unread_spool_stays_within_its_limit_and_counts_what_it_drops(
    directory: Path,
) -> None:
    limit = 2000
    writer = SpoolWriter(directory, limit_bytes=limit)
    kept = [n for n in range(200) if append(writer, n, 20)]
    assert 0 < len(kept) < 200
    assert size_of(directory) <= limit + SEGMENT_BYTES
    delivered = read_all(directory)
    assert numbers(delivered) == kept == list(range(len(kept)))
    spool_reader.discard(directory, before=len(delivered))
    assert append(writer, 200)
    assert numbers(read_all(directory, len(delivered))) == [200]
    assert writer.take_num_dropped() == 200 - len(kept)
    assert append(writer, 201)
    assert writer.take_num_dropped() == 0


def test_frames_that_a_full_disk_does_not_take_are_written_when_it_has_space(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SpoolWriter(directory, limit_bytes=1 << 30)
    monkeypatch.setattr(spool, "WAITING_BYTES", 2000)
    append(writer, 0)
    with monkeypatch.context() as full:
        full.setattr(os, "write", _no_room)
        kept = [n for n in range(1, 200) if append(writer, n, 20)]
        assert writer.append(FrameKind.ARTIFACT, {"n": 200}, vital=True)
    assert 5 < len(kept) < 100, "no more than it may keep"
    assert numbers(read_all(directory)) == [0]
    assert append(writer, 201)
    assert numbers(read_all(directory)) == [0, *kept, 200, 201]
    assert writer.take_num_dropped() == 199 - len(kept)
    with monkeypatch.context() as full:
        full.setattr(os, "write", _no_room)
        assert append(writer, 202)
    writer.close()
    assert numbers(read_all(directory))[-1] == 202


def _no_room(fd: int, data: bytes) -> int:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_half_a_frame_is_left_until_its_rest_is_there(directory: Path) -> None:
    writer = SpoolWriter(directory, limit_bytes=1 << 30)
    append(writer, 0)
    writer.close()
    offset = len(read_all(directory))
    ((_, path),) = segments(directory)
    line = b'{"kind":"metrics","time":1.0,"body":{"n":1}}\n'
    with path.open("ab") as file:
        for cut in range(len(line)):
            file.write(line[cut : cut + 1])
            file.flush()
            seen = spool_reader.read(directory, offset, 1)
            assert seen == (line if cut == len(line) - 1 else b"")
    assert numbers(spool_reader.tail(directory)) == [0, 1]


def test_the_tail_of_a_killed_writer_holds_its_whole_frames_only(directory: Path) -> None:
    writer = SpoolWriter(directory, limit_bytes=1 << 30)
    append(writer, 7)
    writer.close()
    with segments(directory)[-1][1].open("ab") as file:
        file.write(b'{"kind":"err')
    assert numbers(spool_reader.tail(directory)) == [7]


def test_a_spool_that_is_not_there_is_empty(directory: Path) -> None:
    assert segments(directory) == []
    assert spool_reader.read(directory, 0, 100) == b""
    assert not spool_reader.has_more(directory, 0)
    assert spool_reader.tail(directory) == b""
    spool_reader.discard(directory, before=100)


def test_frames_have_the_rank_and_incarnation_of_their_spool(directory: Path) -> None:
    writer = SpoolWriter(directory, limit_bytes=1 << 30)
    writer.append(FrameKind.LOG, {"line": 0, "text": "naïve ☂\n"})
    (frame,) = spool_reader.decode(KEY, read_all(directory))
    assert (frame.rank, frame.incarnation, frame.kind) == (3, 1, FrameKind.LOG)
    assert frame.body == {"line": 0, "text": "naïve ☂\n"}
    assert spool_reader.parse_key(KEY) == (3, 1)


def test_removing_an_attempt_takes_its_jobs_folder_with_the_last(directory: Path) -> None:
    job = directory.parent.parent
    for attempt in ("1", "2"):
        SpoolWriter(job / attempt / KEY, limit_bytes=1 << 20).append(FrameKind.LOG, {})
    spool_reader.remove(job / "1")
    assert [path.name for path in job.iterdir()] == ["2"]
    spool_reader.remove(job / "2")
    assert not job.exists()
    spool_reader.remove(job / "2")


def test_a_replacements_frames_come_after_all_of_the_rank_before_it(tmp_path: Path) -> None:
    """This also works with little space per reply, ten replacements, and a truncated last frame."""
    keys = [spool_reader.spool_key(1, incarnation, "metrics") for incarnation in range(12)]
    for incarnation, key in enumerate(keys):
        writer = SpoolWriter(tmp_path / key, limit_bytes=1 << 20)
        for n in range(20):
            append(writer, 100 * incarnation + n)
        writer.close()
        with segments(tmp_path / key)[-1][1].open("ab") as file:
            file.write(b'{"kind": "metr')
    other = spool_reader.spool_key(0, 0, "metrics")
    append(SpoolWriter(tmp_path / other, limit_bytes=1 << 20), 7)
    ordered = sorted([other, *keys], key=spool_reader.parse_key)
    cursor: dict[str, int] = {}
    seen: list[int] = []
    others: list[int] = []
    while found := spool_reader.read_all(tmp_path, ordered, cursor, 700).data:
        for key, data in found.items():
            (others if key == other else seen).extend(numbers(data))
            cursor[key] = cursor.get(key, 0) + len(data)
    assert seen == [100 * incarnation + n for incarnation in range(12) for n in range(20)]
    assert others == [7]


def test_a_rank_that_floods_its_log_delays_no_metrics_and_no_line_of_another(
    directory: Path,
) -> None:
    attempt = directory.parent
    keys = [
        spool_reader.spool_key(rank, 0, stream) for rank in (0, 1) for stream in ("log", "metrics")
    ]
    flood = SpoolWriter(attempt / keys[0], limit_bytes=1 << 30)
    others = [SpoolWriter(attempt / key, limit_bytes=1 << 30) for key in keys[1:]]
    cursor: dict[str, int] = {}
    for n in range(5):
        for _ in range(300):
            append(flood, n, filling=50)
        for writer in others:
            append(writer, n)
        found = spool_reader.read_all(attempt, keys, cursor, 4000).data
        assert all(numbers(found[key]) == [n] for key in keys[1:])
        cursor = {key: cursor.get(key, 0) + len(data) for key, data in found.items()}
    assert cursor[keys[0]] < flood.position, "it is behind, and alone"
