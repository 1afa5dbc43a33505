"""Metrics are guessed from what scripts print, and numbers of other kinds are not."""

from __future__ import annotations

import asyncio
import io
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dray.train.spool import SpoolWriter
from ray_workers.node.found_metrics import finder, guesses
from ray_workers.node.found_metrics.finder import MetricFinder, may_guess
from ray_workers.node.found_metrics.guesses import Guesses
from ray_workers.node.found_metrics.lines import SearchBudget
from ray_workers.shared import spool_reader
from ray_workers.shared.contracts import GUESSED, FrameKind
from tests.wire import rank_task

Series = dict[str, list[tuple[int, float]]]


def unlimited() -> Guesses:
    return Guesses(SearchBudget(1e9, 1e9))


def guessed(*lines: str) -> Series:
    """The points of each series, as (step, value)."""
    found = unlimited()
    for line in lines:
        found.take(line)
    series: Series = {}
    for point in found.release():
        assert point.key.startswith(GUESSED)
        series.setdefault(point.key.removeprefix(GUESSED), []).append((point.step, point.value))
    return series


BAR = " 45%|####5     | {at}/100 [00:01<00:09, 9.90it/s, loss={loss}, acc={acc}]"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["loss=0.12", "loss=0.11"], {"loss": [(1, 0.12), (2, 0.11)]}),
        (["loss: 0.12"], {"loss": [(1, 0.12)]}),
        (["Epoch 1/3 Loss 0.5", "Epoch 2/3 Loss 0.4"], {"Loss": [(1, 0.5), (2, 0.4)]}),
        (
            ["step 0: train loss 4.1, val loss 4.2", "step 500: train loss 2.1, val loss 2.2"],
            {"train_loss": [(0, 4.1), (500, 2.1)], "val_loss": [(0, 4.2), (500, 2.2)]},
        ),
        (
            ["iter 10: loss 3.2, time 12.00ms, mfu 3.10%"],
            {"loss": [(10, 3.2)], "mfu": [(10, 3.1)]},
        ),
        (
            [
                "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3",
                "Train Epoch: 2 [0/60000 (0%)]\tLoss: 2",
            ],
            {"Loss": [(640, 2.3), (641, 2.0)]},
        ),
        (
            ["loss: 2.303  [   64/60000]", " Accuracy: 64.6%, Avg loss: 1.08  "],
            {"loss": [(64, 2.303)], "Accuracy": [(1, 64.6)], "Avg_loss": [(1, 1.08)]},
        ),
        (
            ["Epoch [1/5], Step [100/600], Loss: 0.12", "Epoch [2/5], Step [100/600], Loss: 0.1"],
            {"Loss": [(100, 0.12), (200, 0.1)]},
        ),
        (  # the final state of the bar of each epoch
            [f"Epoch {at}: " + BAR.format(at=60, loss=at, acc=0) for at in (1, 2, 3)],
            {"loss": [(60, 1), (120, 2), (180, 3)], "acc": [(60, 0), (120, 0), (180, 0)]},
        ),
        (
            [BAR.format(at=45, loss=0.5, acc=0.9), "Epoch 1: " + BAR.format(at=60, loss=1, acc=2)],
            {"loss": [(45, 0.5), (60, 1.0)], "acc": [(45, 0.9), (60, 2.0)]},
        ),
        (
            ["\x1b[1m39/39\x1b[0m \x1b[32m━━\x1b[0m 1s 3ms/step - loss: 0.5 - val_loss: 0.3"],
            {"loss": [(39, 0.5)], "val_loss": [(39, 0.3)]},
        ),
        (["{'loss': 0.5, 'epoch': 0.1}", "{'loss': '0.4'}"], {"loss": [(1, 0.5), (2, 0.4)]}),
        (['{"step": 10, "loss": 0.25, "lr": 1e-3}'], {"loss": [(10, 0.25)], "lr": [(10, 1e-3)]}),
        (
            ["2026-01-02 12:00:01,123 INFO train.py:42 step=3 loss = 0.5"],
            {"loss": [(3, 0.5)]},
        ),
        (["INFO:root:loss=0.5"], {"loss": [(1, 0.5)]}),
        (["loss: tensor(0.25, grad_fn=<NllLossBackward0>)"], {"loss": [(1, 0.25)]}),
        (["loss=inf", "loss=-inf"], {"loss": [(1, math.inf), (2, -math.inf)]}),
        (["Episode 10 reward: -3", "Episode 20 reward: 5."], {"reward": [(10, -3), (20, 5)]}),
        (["tok/s=100", "tok/s=110"], {"tok/s": [(1, 100.0), (2, 110.0)]}),
        (
            ["Test set: Average loss: 0.0465, Accuracy: 9823/10000 (98%)"],
            {"Average_loss": [(1, 0.0465)], "Accuracy": [(1, 0.9823)]},
        ),
        (["acc: 98/100", "acc 99/100"], {"acc": [(1, 0.98), (2, 0.99)]}),
        (["acc 990 out of 1000"], {"acc": [(1, 0.99)]}),
        (["Step 100/1000 loss 0.3"], {"loss": [(100, 0.3)]}),
        (["Epoch [3/10] loss: 0.3"], {"loss": [(3, 0.3)]}),
        (["Epoch 3/10: 45/100 - acc: 45.5 %"], {"acc": [(45, 45.5)]}),
        (["val acc=98.5% (best 99.0%)"], {"val_acc": [(1, 98.5)]}),
        (["0:03: loss=0.5, correct: 98/100"], {"loss": [(1, 0.5)]}),
        (["loss: 0.5:  30%|###       | 9/30 [00:01<00:09, 9.90it/s]"], {"loss": [(9, 0.5)]}),
        (
            ["train_loss=0.1 acc=0.28:  30%|###   | 9/30 [00:01<00:09, 9.90it/s]"],
            {"train_loss": [(9, 0.1)], "acc": [(9, 0.28)]},
        ),
        (["loss: 0.5: 9it [00:01, 9.90it/s]"], {"loss": [(1, 0.5)]}),
        (["acc: 64.6% | loss: 0.5 | 3"], {"acc": [(1, 64.6)], "loss": [(1, 0.5)]}),
        (["sparsity: 45.5%"] * 2, {"sparsity": [(1, 45.5), (2, 45.5)]}),
        (  # a setting, and then a metric that has the same numbers as the other
            ["lr=0.003", *(f" 9%|# | {at}/99 [0s, loss={at}, lr=0.1]" for at in (24, 48))],
            {"loss": [(24, 24), (48, 48)], "lr": [(24, 0.1), (48, 0.1)]},
        ),
        (
            ["hidden=128", *(f"step {at} loss=1 hidden={at}" for at in (0, 10))],
            {"loss": [(0, 1), (10, 1)], "hidden": [(0, 0), (10, 10)]},
        ),
        (
            ["loss=3", "Epoch 1 loss=2", *(f"step {at}: loss=1 acc=0" for at in (20, 40))],
            {"loss": [(1, 3), (2, 2), (20, 1), (40, 1)], "acc": [(20, 0), (40, 0)]},
        ),
        (  # a bar that shows its newest count late
            [f"loss: {loss}:  1%|# | {at}/30 [0s]" for loss, at in ((3, 9), (2, 9), (1, 29))],
            {"loss": [(9, 3), (10, 2), (29, 1)]},
        ),
        (["lr=0.1", "lr=0.05"], {"lr": [(1, 0.1), (2, 0.05)]}),
    ],
)
def test_what_programs_print_is_read(lines: list[str], expected: Series) -> None:
    assert guessed(*lines) == expected


NOISE = [
    "2026-11-28 02:48:26,123 INFO starting",
    "Date: 2026-01-02",
    "time: 12:30:45",
    "took: 3.5s",
    "Elapsed: 12.5",
    "listening at tcp://127.0.0.1:29500",
    "host: 10.0.0.1",
    "localhost:8080",
    "device cuda:0",
    "Port: 8080",
    "torch==2.13.0",
    "http://x/?loss=0.1&acc=3",
    "python train.py --loss=0.1",
    "error 404",
    "Error: 12/100",
    "return 0",
    "Saved 10 files, page 3",
    "x=1,234",
    "  45%|####5     | 45/100 [00:01<00:09, 9.90it/s]",
    "train:  53%|####5     | 53/100 [00:01<00:09, 9.90it/s]",
    "train: 100%|██████████| 100/100 [00:01<00:00, 9.90it/s]",
    "Validating:  53%|#####3    | 53/100 [00:01<00:09, 9.90it/s]",
    "ep0:  53%|#####3    | 53/100 [00:01<00:09, 9.90it/s]",
    "[2/9] fit:  53%|#####3    | 53/100 [00:01<00:09, 9.90it/s]",
    "Downloading model.bin:  53%|#####3    | 5.3M/10M [00:01<00:09, 9.90MB/s]",
    "val_loss:  53%|#####3    | 53/100 [00:01<00:09, 9.90it/s]",
    "train:  53% 53/100 [00:01<00:09, 9.90it/s]",
    "train:  53% (53 of 100) |####    | Elapsed Time: 0:00:01",
    "train: 53% complete",
    "File 'train.py', line 3, in <module>",
    "loss = model(x)",
    "loss: 0x7f3a",
    "loss=3.2.1",
    "seed: 42",
    "acc: 98/100 (12%)",
    "loss: 3/10",
    "loss: 3  / 10",
    "loss: 3 of 10",
    "acc: 11/10",
    "acc: 1/10/2026",
    "loss: 0,125",
    "loss: 0,5",
    "loss: 1 234.5",
    "loss: 1'234.5",
    "val_loss: 0.5 -> 0.4",
    "val_loss: 0.5 --> 0.4",
    "precision=16",
    "error: 2",
    "",
]


@pytest.mark.parametrize("line", NOISE)
def test_other_numbers_are_not_taken_however_often_they_come(line: str) -> None:
    assert guessed(line, line, line) == {}


def test_a_bar_of_tqdm_is_read_as_tqdm_prints_it() -> None:
    """The installed release of tqdm writes the lines."""
    tqdm = pytest.importorskip("tqdm").tqdm
    printed = io.StringIO()
    bar = tqdm(total=3, file=printed, desc="Epoch 2", mininterval=0.0)
    for at in range(3):
        bar.set_postfix(loss=0.5 - at / 10, acc=f"{at}/3", refresh=False)
        bar.update()
    bar.close()
    lines = re.split(r"[\r\n]+", printed.getvalue())
    assert guessed(*lines) == {
        "loss": [(1, 0.5), (2, 0.4), (3, 0.3)],
        "acc": [(1, 0.0), (2, 1 / 3), (3, 2 / 3)],
    }


def test_the_description_of_a_bar_of_tqdm_is_read_and_its_percent_is_not() -> None:
    tqdm = pytest.importorskip("tqdm").tqdm
    printed = io.StringIO()
    bar = tqdm(total=4, file=printed, desc="train", mininterval=0.0)
    for at in range(4):
        bar.set_description(f"loss: {0.5 - at / 10:.4f}", refresh=False)
        bar.update()
    bar.close()
    lines = re.split(r"[\r\n]+", printed.getvalue())
    assert guessed(*lines) == {"loss": [(1, 0.5), (2, 0.4), (3, 0.3), (4, 0.2)]}


def test_a_setting_that_is_printed_once_is_no_metric() -> None:
    assert guessed("hidden=128 dropout=0.1 epochs=10", "loss=1", "loss=2").keys() == {"loss"}


def test_the_newest_values_are_kept_of_more_than_can_be_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guesses, "MAX_HELD", 5)
    found = guessed(*(f"loss={step}" for step in range(1000)))
    assert found == {"loss": [*((at + 1, float(at)) for at in range(5)), (1000, 999.0)]}


def test_names_are_bounded() -> None:
    found = guessed(*(f"loss_{name}=1" for name in range(3 * guesses.MAX_NAMES)))
    assert len(found) == guesses.MAX_NAMES


@pytest.mark.parametrize(
    "line",
    ["train " * 160 + "1", "a=1 " * 250, "val val val x" * 70, "step" + " " * 900 + "1", "0/" * 490,
     "loss=0.1, " * 99, "a" * 10**6 + "=1"],
)  # fmt: skip
def test_no_line_takes_long(line: str) -> None:
    found, looked = unlimited(), 20
    began = time.thread_time()
    for _ in range(looked):
        found.take(line)
    assert (time.thread_time() - began) / looked < 0.1


def test_lines_beyond_the_share_of_the_time_are_passed_over() -> None:
    """Each search takes 0.01 s by this timer, and the clock stands still."""
    ticks = iter(range(10**6))
    budget = SearchBudget(
        guesses.LINES_PER_S, guesses.SHARE, lambda: 0.0, lambda: next(ticks) / 100
    )
    found = Guesses(budget)
    for at in range(100):
        found.take(f"loss={at}")
    assert len(found.release()) == pytest.approx(100 * guesses.SHARE, abs=1)


Style = Callable[[int, float, float], list[str]]
STYLES: dict[str, Style] = {
    "plain": lambda at, a, b: [f"epoch {at}: loss={a} acc={b}"],
    "logging": lambda at, a, b: [
        f"2026-11-28 02:48:{at % 60:02d},000 INFO loss: {a}",
        f"[2026-11-28 02:48:26,123][train][INFO] - acc: {b}",
    ],
    "keras": lambda at, a, b: [f"Epoch {at}/99", f"39/39 - 1s - 3ms/step - loss: {a} - acc: {b}"],
    "bar": lambda at, a, b: [f" 1%|#| {at}/999 [00:01<00:09, 9.9it/s, loss={a}, acc={b}]"],
    "lightning": lambda at, a, b: [
        f"Epoch {at}: 100%|#| 9/9 [00:00<00:00, 50.1it/s, v_num=0, loss={a}, acc={b}]"
    ],
    "dict": lambda at, a, b: [f"{{'loss': {a}, 'acc': {b}, 'epoch': {at / 7}}}"],
    "json": lambda at, a, b: [f'{{"step": {at}, "loss": {a}, "acc": {b}}}'],
    "words": lambda at, a, b: [f"step {at} | loss {a:e} | acc {b:e}"],
}
VALUES = st.floats(-1e6, 1e6).filter(lambda value: value == 0.0 or abs(value) > 1e-9)


@given(
    st.sampled_from(sorted(STYLES)),
    st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=20),
    st.lists(st.sampled_from(NOISE), max_size=10),
    st.randoms(use_true_random=False),
)
def test_every_value_of_a_program_is_read_whatever_else_it_prints(
    style: str, values: Sequence[tuple[float, float]], noise: Sequence[str], random: Any
) -> None:
    printed: list[str] = []
    for at, (loss, acc) in enumerate(values, 1):
        printed += STYLES[style](at, loss, acc)
    for line in noise:
        printed.insert(random.randint(0, len(printed)), line)
    found = guessed(*printed)
    assert found.keys() == {"loss", "acc"}
    for index, name in enumerate(("loss", "acc")):
        expected = [pair[index] for pair in values]
        assert [value for _, value in found[name]] == pytest.approx(expected, rel=1e-5)
        steps = [step for step, _ in found[name]]
        assert steps == sorted(set(steps)), "each step is a point of its own"
        if style in ("plain", "bar", "json", "words"):
            assert steps == list(range(1, len(values) + 1))


# In a spool.


def found_by(task_folder: Path) -> list[dict[str, Any]]:
    data = spool_reader.read(task_folder / "r0.0.found", 0, 1 << 20)
    return [dict(frame.body) for frame in spool_reader.decode("r0.0.found", data)]


def finder_of(folder: Path, **spec: Any) -> MetricFinder:
    task = rank_task(
        spool_dir=str(folder / "r0.0.metrics"),
        work_dir=str(folder / "work"),
        folders_dir=str(folder / "folders"),
        folder_url=str(folder / "job" / "checkpoint-folder"),
        spec={"script": {"entrypoint": "a.py", "guesses": True}, "metrics": [], **spec},
    )
    found = MetricFinder(task, since=0.0)
    found.begin()
    return found


async def test_guesses_are_left_on_the_spool_at_the_end(tmp_path: Path) -> None:
    found = finder_of(tmp_path)
    found.logged("step 1 loss=0.5")
    assert await found.finish() is None
    expected = {"step": 1, "values": {"guessed/loss": 0.5}, "found": True}
    assert found_by(tmp_path) == [expected]


async def test_guesses_are_left_while_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "GUESSES_PERIOD_S", 0.01)
    found = finder_of(tmp_path)
    found.logged("step 1 loss=0.5")
    async with asyncio.timeout(30.0):
        while not (tmp_path / "r0.0.found").exists():
            await asyncio.sleep(0.01)
    await found.finish()


async def test_a_script_that_reports_or_logs_metrics_has_none_guessed(tmp_path: Path) -> None:
    for name in ("reports", "writes"):
        folder = tmp_path / name
        found = finder_of(folder)
        found.logged("step 1 loss=0.5")
        if name == "reports":
            spool = SpoolWriter(folder / "r0.0.metrics", limit_bytes=1 << 20)
            spool.append(FrameKind.METRICS, {"step": 1, "values": {"train/loss": 0.5}})
        else:
            (folder / "work").mkdir(parents=True)
            (folder / "work" / "metrics.csv").write_text("step,loss\n1,0.5\n")
        await found.finish()
        keys = {key for body in found_by(folder) for key in body["values"]}
        assert keys == (set() if name == "reports" else {"loss"})


def test_guesses_are_of_rank_0_of_scripts_that_name_no_metrics() -> None:
    script = {"entrypoint": "a.py", "guesses": True}
    assert may_guess({"script": script, "metrics": []}, 0)
    assert not may_guess({"script": script, "metrics": []}, 1)
    assert not may_guess({"script": {**script, "guesses": False}, "metrics": []}, 0)
    assert not may_guess({"script": script, "metrics": [{"source": "none"}]}, 0)
    assert not may_guess({"script": None, "metrics": []}, 0)
