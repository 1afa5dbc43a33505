"""Interleaved turns of dray and TRL, with LoRA and with all weights, and their first steps."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import torchrun
from benchmarks.figures import ratio_of_medians
from benchmarks.fine_tuning import trl_rank as trl
from benchmarks.fine_tuning.work import (
    NUM_RANKS,
    SIZES,
    document,
    make_base,
    slots_per_token,
    write_examples,
    write_words,
)
from benchmarks.machine import ROOT, BenchmarkError, clean_environment, wait_until_quiet
from benchmarks.processes import service, torchrun_command
from benchmarks.report import Comparison, Result, Row
from dray import Client
from dray.train.spool import segments
from dray.views import JobState

TRL = ROOT / ".venv-trl" / "bin" / "python"
TIMEOUT_S = 900.0
FIRST_STEP_S, FIRST_STEP_SHARE = 5.0, 1 / 3
WAYS = {"LoRA": True, "all weights": False}
METHOD = (
    "Two ranks on CPU (gloo, one thread each, fp32) fine-tune a Llama with random weights "
    f"(hidden size {SIZES['hidden_size']}, {SIZES['num_hidden_layers']} layers) on "
    f"{trl.NUM_EXAMPLES} prompts and completions, whose lengths are log-normal, for "
    f"{trl.NUM_EPOCHS} epochs with {trl.BATCH_SIZE} examples per rank and step, AdamW (fused), "
    f"and a loss over the completions. LoRA has rank {trl.RANK} in every linear layer. dray "
    "is its loop without its service, and TRL is `SFTTrainer` under torchrun, without gradient "
    "checkpointing. Both report the metrics of every step.",
    "The samples are microseconds per token of the examples, without padding. The first epoch is "
    "not counted. Turns of dray and TRL alternate. TRL does not pack, because it packs without "
    "attention across examples only with flash attention, which needs a GPU.",
    "First step: dray from just before the POST to a running service, to the job's "
    "`first_step_at`. TRL from the exec of torchrun to the end of the first step. The base is a "
    "local folder, and all files are in the page cache.",
    "Ratio of medians, with an interval from a bootstrap of both sides. A/A: dray's odd turns "
    "against its even turns.",
)


@dataclass
class Samples:
    """The turns of one way to train."""

    dray: list[float] = field(default_factory=list)
    packed: list[float] = field(default_factory=list)
    trl: list[float] = field(default_factory=list)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Run `num_rounds` turns of each contender, after one first step that is not counted."""
    if not TRL.exists():
        raise BenchmarkError(f"{TRL} does not exist: `make bench` installs it")
    speeds = {name: Samples() for name in WAYS}
    starts = Samples()
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder:
        home = Path(folder)
        generator = random.Random(0)
        words = write_words(generator)
        make_base(home / "base", words)
        lengths = write_examples(home / "examples.jsonl", words, generator, trl.NUM_EXAMPLES)
        write_examples(home / "validation.jsonl", words, generator, NUM_RANKS * trl.BATCH_SIZE)
        num_tokens = sum(lengths)
        for number in range(num_rounds):
            for name, lora in WAYS.items():
                each, turn = speeds[name], f"{number}-{int(lora)}"
                each.dray.append(_of_dray(home, turn, num_tokens, lora=lora, packing=False))
                each.trl.append(_of_trl(home, turn, num_tokens, lora=lora))
                each.packed.append(_of_dray(home, turn, num_tokens, lora=lora, packing=True))
                latest = (each.dray[-1], each.packed[-1], each.trl[-1])
                progress(
                    f"{number}  {name}: dray, dray with packing, TRL: "
                    + ", ".join(f"{one * 1e6:.0f} us per token" for one in latest)
                )
        (home / "service").mkdir()
        with service(home / "service", num_slots=NUM_RANKS) as client:
            for number in range(num_rounds + 1):
                wait_until_quiet(at_least_s=6.0)
                ours = _first_step_of_dray(client, home)
                wait_until_quiet(at_least_s=2.0)
                theirs = _first_step_of_trl(home)
                progress(f"{number}  first step: dray {ours:.2f} s, TRL {theirs:.2f} s")
                if number:
                    starts.dray.append(ours)
                    starts.trl.append(theirs)
    return conclude(speeds, starts, slots_per_token(lengths, generator))


def conclude(speeds: Mapping[str, Samples], starts: Samples, padding: float) -> Result:
    """Compute the figures from the samples. padding: number of tokens, including padding,
    that batches without packing have per token of the examples."""
    rows, comparisons = [], []
    for name, each in speeds.items():
        rows += [
            Row(f"{name}: dray", each.dray),
            Row(f"{name}: dray with packing", each.packed),
            Row(f"{name}: TRL", each.trl),
        ]
        comparisons += [
            _compare(f"{name}, dray / TRL", each.dray, each.trl, 1.0, "at most 1"),
            _compare(
                f"{name}, dray with packing / dray without",
                each.packed,
                each.dray,
                1 / padding,
                f"at most {1 / padding:.2f}, the share of tokens in batches without packing",
            ),
        ]
    rows += [Row("first step: dray", starts.dray), Row("first step: TRL", starts.trl)]
    goal = f"at most 1/3, and dray at most {FIRST_STEP_S:g} s"
    first = _compare("first step, dray / TRL", starts.dray, starts.trl, FIRST_STEP_SHARE, goal)
    return Result(
        name="fine_tuning",
        title="Fine-tuning a language model",
        method=METHOD,
        rows=rows,
        comparisons=[*comparisons, first],
    )


def _compare(
    label: str, ours: Sequence[float], theirs: Sequence[float], goal: float, words: str
) -> Comparison:
    ratio = ratio_of_medians(ours, theirs)
    same = ratio_of_medians(ours[0::2], ours[1::2])
    return Comparison(label, len(ours), ratio, same, words, ratio.low <= goal)


def _of_dray(home: Path, turn: str, num_tokens: int, *, lora: bool, packing: bool) -> float:
    """Return the seconds per token, without the first epoch."""
    wait_until_quiet()
    folder = home / f"dray-{turn}-{int(packing)}"
    folder.mkdir()
    job = document(home, lora=lora, packing=packing)
    torchrun.train(job, folder, num_ranks=NUM_RANKS, timeout_s=TIMEOUT_S)
    steps: dict[int, float] = {}
    for _, path in segments(folder / "spool-0"):
        for line in path.read_text().splitlines():
            frame = json.loads(line)
            if frame["kind"] == "metrics" and "perf/step_time_s" in frame["body"]["values"]:
                body = frame["body"]
                steps[body["step"]] = body["values"]["perf/step_time_s"]
    _check_steps(len(steps))
    first = len(steps) // trl.NUM_EPOCHS
    seconds = sum(duration for step, duration in steps.items() if step > first)
    return seconds / (num_tokens * (trl.NUM_EPOCHS - 1))


def _of_trl(home: Path, turn: str, num_tokens: int, *, lora: bool) -> float:
    """Return the seconds per token, without the first epoch."""
    wait_until_quiet()
    times = _train_with_trl(home, home / f"trl-{turn}", lora=lora)
    first = len(times) // trl.NUM_EPOCHS
    return (times[-1] - times[first - 1]) / (num_tokens * (trl.NUM_EPOCHS - 1))


def _train_with_trl(home: Path, folder: Path, *, lora: bool) -> list[float]:
    """Return the times of the ends of the steps."""
    folder.mkdir(exist_ok=True)
    target = folder / "times.json"
    arguments = (str(home / "base"), str(home / "examples.jsonl"), "lora" if lora else "full")
    command = torchrun_command(trl.__file__, *arguments, str(target), num_ranks=NUM_RANKS)
    ended = subprocess.run(
        [str(TRL), *command[1:]],
        cwd=folder,
        env=clean_environment() | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if ended.returncode != 0 or not target.exists():
        raise BenchmarkError(f"TRL failed:\n{ended.stderr[-3000:]}")
    times: list[float] = json.loads(target.read_text())
    _check_steps(len(times))
    return times


def _check_steps(number: int) -> None:
    expected = trl.NUM_EPOCHS * trl.NUM_EXAMPLES // (NUM_RANKS * trl.BATCH_SIZE)
    if number != expected:
        raise BenchmarkError(f"{number} steps were reported instead of {expected}")


def _first_step_of_dray(client: Client, home: Path) -> float:
    asked = time.time()
    job = client.wait(client.submit(document(home, lora=True, packing=False)).id, TIMEOUT_S)
    if job.state is not JobState.SUCCEEDED or job.first_step_at is None:
        raise BenchmarkError(f"dray's job ended {job.state}: {job.reason.message}")
    return job.first_step_at.timestamp() - asked


def _first_step_of_trl(home: Path) -> float:
    asked = time.time()
    return _train_with_trl(home, home / "trl-first", lora=True)[0] - asked
