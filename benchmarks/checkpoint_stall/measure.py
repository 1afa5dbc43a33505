"""Saves by each contender in turn, in the same ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.checkpoint_stall.work import WORKS, Work
from benchmarks.figures import ratio_of_medians
from benchmarks.machine import wait_until_quiet
from benchmarks.report import Comparison, Result, Row
from benchmarks.torchrun import torchrun

OURS, DCP, TORCH_SAVE, COPY, NOTHING = "dray", "dcp", "torch.save", "copy", "nothing"
PEERS = {DCP: 1.0, TORCH_SAVE: 0.1}
"""And the most that our stall may be of theirs."""
LABELS = {
    OURS: "dray",
    DCP: "DCP async_save",
    TORCH_SAVE: "torch.save",
    COPY: "a copy in memory (floor)",
    NOTHING: "no save (noise)",
}
WORLD_SIZES = (1, 2)
TIMEOUT_S = 3600.0

METHOD = (
    "One or two ranks on CPU (gloo, one thread each), started by torchrun, train a perceptron "
    "with DDP and fused AdamW. The state consists of the model and the optimizer. {sizes}",
    "A turn consists of some steps, a save with the steps after it until the save is on disk (at "
    "least two), and some more steps. The stall is the time of the middle part minus the time of "
    "the same number of the surrounding steps: it includes the time that the save blocks and how "
    "much it slows the following steps. Contenders take turns in rotating order. The first turn "
    "of each is not counted.",
    "dray: its checkpoint manager, used as in a job, with safetensors, SHA-256 of all bytes, "
    "fsync, and a manifest. DCP: `async_save` in a thread and over a separate process group, "
    "with a persistent stager, so that its memory is reused like dray's, and synced files (no "
    "hashes). torch.save: on rank 0, with fsync (no hashes). All write to the same file system.",
    "The floor is one copy of the state to memory that is already allocated, while training "
    "waits. This is the minimum cost of any snapshot on a machine with no idle cores, before "
    "anything is written.",
    "Ratio of medians, with an interval from a bootstrap of the turns. A/A: the peer's even "
    "turns over its odd turns. The measured stall can be below 0: 'no save' shows the size of "
    "the noise.",
)

Stalls = Mapping[str, Sequence[float]]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """Time `num_rounds * saves_per_round` saves of each contender, size and number of ranks."""
    found: dict[str, Stalls] = {}
    for work in WORKS.values():
        for world_size in WORLD_SIZES:
            label = label_of(work, world_size)
            busy = wait_until_quiet()
            progress(f"{label} ({busy:.0%} of the cores were busy before)")
            found[label] = run(work, world_size, num_rounds * work.saves_per_round)
            progress(f"{label}: {ratio_of_medians(found[label][OURS], found[label][TORCH_SAVE])}")
    return conclude(found)


def label_of(work: Work, world_size: int) -> str:
    return f"{work.name}, {world_size} rank{'s' if world_size > 1 else ''}"


def run(work: Work, world_size: int, num_turns: int) -> Stalls:
    """Start the ranks and read what they measured. BenchmarkError if they fail."""
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        torchrun(
            "benchmarks.checkpoint_stall.rank",
            [work.name, str(num_turns), home],
            num_ranks=world_size,
            timeout_s=TIMEOUT_S,
        )
        stalls: Stalls = json.loads((Path(home) / "stalls.json").read_text())
    return stalls


def conclude(found: Mapping[str, Stalls]) -> Result:
    """The figures that follow from the samples."""
    rows, comparisons = [], []
    for label, stalls in found.items():
        rows += [Row(f"{label}: {LABELS[name]}", stalls[name]) for name in LABELS]
        for peer, most in PEERS.items():
            ratio = ratio_of_medians(stalls[OURS], stalls[peer])
            comparisons.append(
                Comparison(
                    label=f"{label}, dray / {LABELS[peer]}",
                    n=len(stalls[OURS]),
                    ratio=ratio,
                    same=ratio_of_medians(stalls[peer][::2], stalls[peer][1::2]),
                    goal=f"at most {most:g}",
                    met=ratio.value <= most,
                )
            )
    sizes = " ".join(
        f"{work.name}: {work.num_layers} layers of {work.width}, {work.batch_size} samples a rank."
        for work in WORKS.values()
    )
    return Result(
        name="checkpoint_stall",
        title="Stall of a checkpoint",
        method=[line.format(sizes=sizes) for line in METHOD],
        rows=rows,
        comparisons=comparisons,
    )
