"""Metrics are found in the output and the files of scripts that do not report them."""

from __future__ import annotations

import base64
import math
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dray.tensorboard.event_files import masked_crc32c
from ray_workers.node.found_metrics import files, finder, lines
from ray_workers.node.found_metrics.files import MetricFiles
from ray_workers.node.found_metrics.finder import MetricFinder, sources_of
from ray_workers.node.found_metrics.lines import (
    FoundPoint,
    LinePatterns,
    SearchBudget,
    TrainerLines,
)
from ray_workers.node.found_metrics.runs import RunNames
from ray_workers.shared import spool_reader
from ray_workers.shared.folders.work_dir import output_dir
from tests.wire import rank_task

BOTH = frozenset(("tensorboard", "csv"))
WRITTEN_BY_TENSORBOARDX = base64.b64decode(
    "GAAAAAAAAACjf0siCTyoS6COwdpBGg1icmFpbi5FdmVudDoy7b/YxhoAAAAAAAAAEpvYLQkAAABA/FTZQRABKg0K"
    "CwoEbG9zcxUAAAA/jbAuOR4AAAAAAAAA2dwSMgkAAABA/FTZQRACKhEKDwoDYWNjQggIASIEAACAPuqysvkiAAAA"
    "AAAAAHgRPf0JAAAAQPxU2UEQAyoVChMKA2FjY0IMCAIyCAAAAAAAAOg/2rWF0zEAAAAAAAAAnYOD6QkAAABA/FTZ"
    "QRADKiQKIgoEaGlzdEIaCAISBBICCAIyEAAAAAAAAOg/AAAAAAAA8D/hqm1b"
)
"""`loss` 0.5 at step 1; `acc` 0.25 at 2 and 0.75 at 3, as tensors; `hist`, two numbers, at 3."""


def metric(**fields: Any) -> dict[str, Any]:
    return {"name": None, "pattern": None, "step": None, "source": None, "rank": 0, **fields}


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc32c(head)) + data + bytes(4)


def event(tag: str, step: int, value: float) -> bytes:
    one = bytes([10, len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)
    summary = bytes([10, len(one)]) + one
    return record(bytes([16, step, 42, len(summary)]) + summary)


def event_file(folder: Path, name: str = "events.out.tfevents.1.host") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


# Lines.


def test_a_pattern_finds_numbers_and_counts_them_or_reads_their_step() -> None:
    found = LinePatterns(
        [
            metric(name="train/loss", pattern=r"loss=(\S+)", step=r"step (\d+)"),
            metric(name="val/acc", pattern=r"acc (\S+)"),
        ]
    )
    assert found.take("step 10 loss=0.5, lr 1") == [FoundPoint("train/loss", 10, 0.5)]
    assert found.take("step 20") == []
    (point,) = found.take("loss=nan")
    assert (point.step, math.isnan(point.value)) == (20, True)
    assert found.take("acc 1e-3.") == [FoundPoint("val/acc", 1, 0.001)]
    assert found.take("acc high") == [], "no number"
    assert found.take("acc -inf \x00\ufffd") == [FoundPoint("val/acc", 2, -math.inf)]


@pytest.mark.parametrize("pattern", [r"((a+)+)$".replace("(a+)", "(?:a+)"), r"(?:x*)*y(\d)"])
def test_no_pattern_takes_long(pattern: str) -> None:
    found = LinePatterns([metric(name="x", pattern=pattern)])
    began = time.process_time()
    assert found.take("a" * 4096 + "x" * 4096 + "!") == []
    assert time.process_time() - began < 0.2


def test_of_more_lines_than_can_be_searched_some_are_passed_over() -> None:
    now = 0.0
    budget = SearchBudget(lines.SEARCHES_PER_S, 1.0, lambda: now, lambda: 0.0)
    found = LinePatterns([metric(name="x", pattern="x (1)")] * 2, budget)
    taken = sum(len(found.take("x 1")) for _ in range(lines.SEARCHES_PER_S))
    assert taken == lines.SEARCHES_PER_S
    assert found.num_skipped == lines.SEARCHES_PER_S // 2
    now = 0.001
    assert found.take("x 1"), "a moment later there is time again"


def test_patterns_that_take_long_get_a_share_of_the_time_and_no_more() -> None:
    clock = 0.0
    took = iter(range(10**6))
    pattern = metric(name="a", pattern=r"a=(\d+)")
    # Each search takes 0.1 s by this timer.
    budget = SearchBudget(
        lines.SEARCHES_PER_S, lines.SEARCH_SHARE, lambda: clock, lambda: next(took) * 0.1
    )
    found = LinePatterns([pattern] * 64, budget)
    assert len(found.take("a=1")) == 3
    assert found.take("a=2") == []
    assert found.num_skipped == 2
    clock = 60.0
    assert len(found.take("a=3")) in (2, 3)
    assert [found.take("a=4") for _ in range(1000)] == [[]] * 1000
    assert found.num_skipped == 1003


def test_records_of_the_trainer_get_the_step_of_its_bar() -> None:
    found = TrainerLines()
    record_ = "{'loss': 0.5, 'grad_norm': nan, 'learning_rate': '5e-05', 'epoch': 0.1}"
    assert found.take("Map: 100%|####| 7/7 [00:00<00:00]\n") == []
    assert found.take("  0%|          | 0/100 [00:00<?, ?it/s]") == []
    assert found.take(record_) == []
    points = found.take(" 10%|#         | 10/100 [00:01<00:09, 9.9it/s]")
    assert [(p.key, p.step) for p in points] == [
        ("train/loss", 10),
        ("train/grad_norm", 10),
        ("train/learning_rate", 10),
    ]
    assert found.take("{'eval_loss': 0.4, 'epoch': 0.1}") == []
    assert found.take("100%|##########| 4/4 [00:01<00:09, 9.9it/s]") == [], "an evaluation's bar"
    assert found.take(" 10%|#   | 10/100 [00:01<]") == [FoundPoint("eval/loss", 10, 0.4)]


def test_the_bar_of_an_evaluation_before_the_training_is_not_the_trainings() -> None:
    found = TrainerLines()
    assert found.take("100%|##########| 2/2 [00:00<00:00, 9.9it/s]") == []
    assert found.take("  0%|          | 0/100 [00:00<?, ?it/s]") == []
    for step in (10, 20):
        assert found.take(f"{{'loss': {step}.5, 'epoch': 0.1}}") == []
        points = found.take(f" 10%|#         | {step}/100 [00:01<00:09, 9.9it/s]")
        assert points == [FoundPoint("train/loss", step, step + 0.5)]


def test_a_record_with_colours_is_read() -> None:
    found = TrainerLines()
    assert found.take(" 10%|#         | 10/100 [00:01<00:09, 9.9it/s]") == []
    assert found.take("{'eval_loss': 0.4, 'epoch': 0.1}") == []
    assert found.take(" 10%|#   | 10/100 [00:01<]") == [FoundPoint("eval/loss", 10, 0.4)]
    assert found.take("\x1b[A\x1b[K\x1b[32m{'eval_loss': 0.3, 'epoch': 0.2}\x1b[0m") == []
    assert found.take(" 20%|#   | 20/100 [00:01<]") == [FoundPoint("eval/loss", 20, 0.3)]


def test_records_of_a_trainer_without_a_bar_are_numbered() -> None:
    found = TrainerLines()
    points = [
        point
        for line in ("{'loss': 2, 'epoch': 1}", "{'eval_loss': 3, 'epoch': 1}", "{'loss': 1}")
        for point in found.take(line)
    ]
    points += found.take("{'loss': 1.0, 'epoch': 2}") + found.finish()
    assert points == [
        FoundPoint("train/loss", 1, 2.0),
        FoundPoint("eval/loss", 1, 3.0),
        FoundPoint("train/loss", 2, 1.0),
    ]


def test_evaluations_of_a_trainer_without_a_bar_are_all_kept() -> None:
    found = TrainerLines()
    lines = [f"{{'eval_loss': {value}, 'epoch': {value}}}" for value in (3, 2, 1)]
    points = [point for line in lines for point in found.take(line)] + found.finish()
    assert points == [FoundPoint("eval/loss", step, 3.0 - step) for step in range(3)]


BAR_AT = " {at}%|#         | {at}/100 [00:01<00:09, 9.9it/s]"


@pytest.mark.parametrize(
    ("lines", "steps"),
    [
        ([20, "loss", 20, "loss", "loss"], [20, 21, 22]),
        ([20, "loss", 20, "loss", "loss", 21], [20, 21, 22]),
        ([20, "loss", 20, "loss", 20, "loss", 30], [20, 21, 30]),
        ([20, "eval_loss", 20, "eval_loss", "eval_loss"], [20, 21, 22]),
        ([20, "eval_loss", 20, "eval_loss", 20, "eval_loss", 20], [20, 21, 22]),
    ],
)
def test_records_whose_bar_is_not_drawn_anew_are_all_kept(
    lines: list[int | str], steps: list[int]
) -> None:
    found = TrainerLines()
    points: list[FoundPoint] = []
    for line in lines:
        record = f"{{'{line}': 0.5, 'epoch': 0.1}}"
        points += found.take(BAR_AT.format(at=line) if isinstance(line, int) else record)
    assert [point.step for point in points + found.finish()] == steps


# Files.


def test_scalars_of_event_files_are_read_as_they_grow(tmp_path: Path) -> None:
    found = MetricFiles([tmp_path], BOTH, since=0.0)
    path = event_file(tmp_path / "runs" / "a")
    path.write_bytes(WRITTEN_BY_TENSORBOARDX[:90])  # in the middle of a record
    assert found.read() == [FoundPoint("loss", 1, 0.5)]
    path.write_bytes(WRITTEN_BY_TENSORBOARDX)
    assert found.read() == [FoundPoint("acc", 2, 0.25), FoundPoint("acc", 3, 0.75)]
    assert found.read() == []


def test_a_tag_of_several_runs_is_named_after_its_folder(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        event_file(tmp_path / "logs" / name).write_bytes(event("epoch_loss", 3, 1.5))
    points = MetricFiles([tmp_path], BOTH, since=0.0).read()
    assert [point.key for point in points] == ["train/epoch_loss", "validation/epoch_loss"]


def by_key(points: Iterable[FoundPoint]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for point in points:
        found.setdefault(point.key, []).append(point.value)
    return found


def test_tables_of_several_folds_are_a_series_each(tmp_path: Path) -> None:
    for fold in range(3):
        (tmp_path / f"fold{fold}").mkdir()
        rows = "".join(f"{step},{fold}.{step}\n" for step in range(3))
        (tmp_path / f"fold{fold}" / "metrics.csv").write_text(f"epoch,acc\n{rows}")
    found = by_key(MetricFiles([tmp_path], BOTH, since=0.0).read())
    expected = {f"fold{n}/acc": [float(f"{n}.{step}") for step in range(3)] for n in range(3)}
    assert found == expected


def test_event_files_of_nested_folds_are_a_series_each(tmp_path: Path) -> None:
    runs = [f"fold{fold}/{part}" for fold in range(3) for part in ("train", "validation")]
    for number, run in enumerate(runs):
        event_file(tmp_path / "logs" / run).write_bytes(event("loss", 1, float(number)))
    found = by_key(MetricFiles([tmp_path], BOTH, since=0.0).read())
    assert found == {f"{run}/loss": [float(number)] for number, run in enumerate(runs)}


def test_a_run_that_was_alone_keeps_its_name_and_others_get_their_own(tmp_path: Path) -> None:
    found = MetricFiles([tmp_path], BOTH, since=0.0)
    expected = {"a/fold": "acc", "b/fold": "b/fold/acc", "a/Fold": "Fold/acc", "b": "b/acc"}
    for number, (run, name) in enumerate(expected.items()):
        (tmp_path / run).mkdir(parents=True, exist_ok=True)
        (tmp_path / run / "metrics.csv").write_text(f"step,acc\n1,{number}\n")
        assert found.read() == [FoundPoint(name, 1, float(number))]
    with (tmp_path / "a/fold/metrics.csv").open("a") as file:
        file.write("2,9\n")
    assert found.read() == [FoundPoint("acc", 2, 9.0)]


def test_two_tables_of_one_folder_and_equal_folders_of_two_roots_stay_apart(
    tmp_path: Path,
) -> None:
    for at, root in enumerate(("work", "output")):
        (tmp_path / root).mkdir()
        for name in ("metrics", "results"):
            (tmp_path / root / f"{name}.csv").write_text(f"step,acc\n1,{at}{len(name)}\n")
    found = by_key(MetricFiles([tmp_path / "work", tmp_path / "output"], BOTH, since=0.0).read())
    assert len(found) == 4
    assert len({values[0] for values in found.values()}) == 2
    assert {"job/acc", "output/acc"} <= found.keys()


def test_long_and_unprintable_folders_give_short_names_that_differ(tmp_path: Path) -> None:
    folders = ["x" * 200 + end for end in ("1", "2")] + ["new\nline", "new\tline"]
    for number, folder in enumerate(folders):
        event_file(tmp_path / folder).write_bytes(event("k" * 90, 1, float(number)))
    found = by_key(MetricFiles([tmp_path], BOTH, since=0.0).read())
    assert sorted(value for (value,) in found.values()) == [0.0, 1.0, 2.0, 3.0]
    assert all(key.endswith("k" * 90) and len(key) <= 128 for key in found)
    assert all(key.isprintable() for key in found)


def test_names_never_collide_with_tags_that_look_like_them() -> None:
    names = RunNames()
    point = FoundPoint("loss", 1, 1.0)
    first, second = ("job", "fold0"), ("job", "fold1")
    assert names.named([(first, [point])])[0].key == "loss"
    assert names.named([(second, [point])])[0].key == "fold1/loss"
    odd = names.named([(first, [point._replace(key="fold1/loss")])])[0].key
    assert odd not in ("loss", "fold1/loss")


def test_files_beyond_the_limit_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 2)
    for name in "abc":
        event_file(tmp_path / name).write_bytes(event("loss", 1, 1.0))
    found = MetricFiles([tmp_path], BOTH, since=0.0)
    assert len(found.read()) == 2
    assert found.num_passed_over == 1


def test_long_records_are_passed_over_and_damaged_files_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_BYTES", 1 << 10)
    image = record(bytes(2 << 20))
    path = event_file(tmp_path)
    path.write_bytes(event("a", 1, 1.0) + image + event("a", 2, 2.0) + b"garbage" * 9)
    event_file(tmp_path, "x.tfevents.2").write_bytes(os.urandom(4096))
    event_file(tmp_path, "y.tfevents.2").write_bytes(record(b"\xff" * 40))
    found = MetricFiles([tmp_path], BOTH, since=0.0)
    points = found.read()
    while found.has_more:
        points += found.read()
    assert points == [FoundPoint("a", 1, 1.0), FoundPoint("a", 2, 2.0)]


def test_one_look_reads_a_limited_amount_and_every_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "POINTS_PER_LOOK", 3)
    for name in "abc":
        written = b"".join(event(name, step, 1.0) for step in (1, 2))
        event_file(tmp_path, f"events.out.tfevents.{name}").write_bytes(written)
    found = MetricFiles([tmp_path], BOTH, since=0.0)
    looks = []
    while True:
        looks.append([point.key for point in found.read()])
        if not found.has_more:
            break
    assert looks == [["a", "a", "b", "b"], ["c", "c"]]


def test_files_of_before_links_and_pipes_are_not_read(tmp_path: Path) -> None:
    old = event_file(tmp_path / "uploaded")
    old.write_bytes(event("old", 1, 1.0))
    os.utime(old, (100, 100))
    outside = event_file(tmp_path.parent / "another")
    outside.write_bytes(event("theirs", 1, 1.0))
    event_file(tmp_path, "link.tfevents.1").symlink_to(outside)
    (tmp_path / "folder").symlink_to(outside.parent)
    os.mkfifo(tmp_path / "pipe.tfevents.1")
    found = MetricFiles([tmp_path], BOTH, since=200.0)
    assert found.read() == []
    with old.open("ab") as file:
        file.write(event("old", 2, 2.0))
    assert found.read() == [FoundPoint("old", 2, 2.0)], "what is appended is of this process"


def test_tables_are_read_row_by_row_also_when_a_column_comes(tmp_path: Path) -> None:
    found = MetricFiles([tmp_path], BOTH, since=0.0)
    path = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_text("epoch,step,train_loss\n0,9,0.5\n0,19,0.")
    assert found.read() == [FoundPoint("train_loss", 9, 0.5)]
    path.write_text("epoch,step,train_loss,val_loss\n0,9,0.5,\n0,19,0.25,\n0,19,,nan\n")
    points = found.read()
    assert points[:2] == [FoundPoint("train_loss", 9, 0.5), FoundPoint("train_loss", 19, 0.25)]
    assert (points[2].key, points[2].step) == ("val_loss", 19)
    (tmp_path / "results.csv").write_text("   epoch,  train/box_loss\n 1, 1.5\n")
    (tmp_path / "other.csv").write_text("step,x\n1,1\n")
    assert found.read() == [FoundPoint("train/box_loss", 1, 1.5)]


@pytest.mark.parametrize("since", [0.0, 200.0])
@pytest.mark.parametrize("more", ["", "6,0.7\n"])
def test_a_table_that_is_rewritten_is_read_from_its_beginning(
    tmp_path: Path, since: float, more: str
) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,f1\n0,0.1\n1,0.2\n2,0.3\n")
    os.utime(path, (100, 100))
    found = MetricFiles([tmp_path], BOTH, since)
    found.read()
    path.write_text(f"epoch,f1\n3,0.4\n4,0.5\n5,0.6\n{more}")
    assert [point.step for point in found.read()] == [3, 4, 5, 6][: 4 if more else 3]
    path.write_text(f"epoch,f1\n3,0.4\n4,0.5\n5,0.6\n{more}7,0.8\n")
    assert [point.step for point in found.read()] == [7], "the old rows are the same"


def test_an_event_file_that_is_rewritten_is_read_from_its_beginning(tmp_path: Path) -> None:
    found = MetricFiles([tmp_path], BOTH, since=0.0)
    path = event_file(tmp_path)
    path.write_bytes(event("loss", 1, 0.5) + event("loss", 2, 0.25))
    assert len(found.read()) == 2
    path.write_bytes(event("loss", 3, 0.5) + event("loss", 4, 0.25) + event("loss", 5, 0.125))
    assert [point.step for point in found.read()] == [3, 4, 5]
    with path.open("ab") as file:
        file.write(event("loss", 6, 1.0))
    assert [point.step for point in found.read()] == [6]


# Both, in a spool.


def test_the_sources_of_a_rank() -> None:
    assert sources_of([], 0) == BOTH
    assert sources_of([], 1) == frozenset()
    assert sources_of([metric(name="x", pattern="(x)")], 0) == BOTH
    assert sources_of([metric(source="none")], 0) == {"none"}
    everywhere = [metric(source="csv", rank="all")]
    assert sources_of(everywhere, 3) == {"csv"}


async def test_each_step_of_a_key_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "MAX_KEYS", 3)
    spool_dir, work_dir = tmp_path / "r0.0.metrics", tmp_path / "work"
    task = rank_task(
        spool_dir=str(spool_dir),
        work_dir=str(work_dir),
        folders_dir=str(tmp_path / "folders"),
        folder_url=str(tmp_path / "job" / "checkpoint-folder"),
        spec={"metrics": [metric(name="loss", pattern=r"loss (\S+)", step=r"^(\d+)")]},
    )
    found = MetricFinder(task, since=0.0)
    found.begin()
    for line in ("1 loss 3", "1 loss 4", "2 loss 2", "1 loss 9"):
        found.saw(line)
    event_file(work_dir / "runs").write_bytes(WRITTEN_BY_TENSORBOARDX)
    output = output_dir(tmp_path / "folders")
    event_file(output).write_bytes(event("more", 1, 1.0))
    assert await found.finish() is None
    data = spool_reader.read(tmp_path / "r0.0.found", 0, 1 << 20)
    bodies = [dict(frame.body) for frame in spool_reader.decode("r0.0.found", data)]
    assert all(body.pop("found") is True for body in bodies)
    assert bodies == [
        {"step": 1, "values": {"loss": 3.0}},
        {"step": 2, "values": {"loss": 2.0}},
        {"step": 1, "values": {"more": 1.0}},
        {"step": 2, "values": {"acc": 0.25}},
        {"step": 3, "values": {"acc": 0.75}},
    ]


async def test_a_script_without_metrics_leaves_no_spool(tmp_path: Path) -> None:
    none = str(tmp_path / "none")
    spool_dir = str(tmp_path / "r0.0.metrics")
    task = rank_task(spool_dir=spool_dir, work_dir=none, folders_dir=none)
    found = MetricFinder(task, since=0.0)
    found.begin()
    found.saw("a line")
    assert await found.finish() is None
    assert not list(tmp_path.iterdir())
