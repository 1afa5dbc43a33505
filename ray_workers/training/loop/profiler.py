"""Profiles some steps, and summarises how they use their time."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dray import spec, train
from ray_workers.shared.job_log import log
from ray_workers.training import devices

STEP, DATA = "dray.step", "dray.data"
NUM_TOP = 15

Span = tuple[float, float]
"""[begin, end) in microseconds, by the clock of the trace."""


class Profiler:
    """Profiles the steps and ranks that a document selects. Without options, nothing is
    profiled."""

    def __init__(self, options: spec.Profile | None, device: torch.device) -> None:
        self.rank = 0
        """The rank of this process in its group."""
        self._ranks: Sequence[int] = ()
        self._first = self._last = 0
        if options is not None:
            self._ranks, self._first = options.ranks, options.at_step
            self._last = options.at_step + options.num_steps - 1
        self._device = device
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: Any = None
        self._parts: list[Any] = []
        """The open ranges of the step being profiled: the step, and within it, the wait for
        data."""
        self._began_with = 0
        self._is_done = False

    def begin_step(self, step: int) -> None:
        """Begin a step. Call this method before the data of the step are loaded."""
        if self._is_done or not self._is_wanted or not self._first <= step <= self._last:
            return
        self._wait_for_device()  # unfinished operations belong to the previous step
        if self._profile is None:
            self._profile = profile(activities=self._activities)
            self._profile.start()
            self._began_with = step
        for name in (STEP, DATA):
            self._parts.append(record_function(name))
            self._parts[-1].__enter__()

    @property
    def _is_wanted(self) -> bool:
        return self.rank in self._ranks

    def data_came(self) -> None:
        if self._parts:
            self._end_part()

    def end_step(self, step: int) -> None:
        """End a step, and store the artifacts if it is the last step."""
        if not self._parts:
            return
        self._wait_for_device()  # launched operations belong to this step
        self._end_part()
        if step >= self._last:
            self._leave(step)

    def _wait_for_device(self) -> None:
        devices.synchronize(self._device)

    def _end_part(self) -> None:
        self._parts.pop().__exit__(None, None, None)

    def break_off(self) -> None:
        """Discard the profile because the group is broken."""
        if self._profile is not None:
            self._profile.stop()
        self._profile = None
        self._parts.clear()

    def finish(self, steps_done: int) -> None:
        """Store the profile at the end of training, or log that its steps were not reached."""
        if self._profile is not None:
            self._leave(steps_done)
        elif self._is_wanted and not self._is_done:
            log(
                f"rank {self.rank} recorded no profile in this process: the profile was requested "
                f"for steps {self._first} to {self._last}, but training ended after step "
                f"{steps_done}"
            )

    def _leave(self, step: int) -> None:
        """Stop profiling, and store the artifacts of the steps up to this step."""
        self._profile.stop()
        self._save(step)
        self._profile, self._is_done = None, True

    def _save(self, step: int) -> None:
        with TemporaryDirectory(prefix="dray-profile-") as name:
            folder = Path(name)
            trace = folder / "trace.json"
            self._profile.export_chrome_trace(str(trace))
            events = json.loads(trace.read_text())["traceEvents"]
            summary = {
                "steps": [self._began_with, step],
                **summarise(events),
                "top": top_operators(self._profile.key_averages()),
            }
            (folder / "trace.json.gz").write_bytes(gzip.compress(trace.read_bytes(), 6))
            (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            (folder / "summary.txt").write_text(table(summary))
            for part in ("trace.json.gz", "summary.json", "summary.txt"):
                train.save_artifact(folder / part, f"{self._folder}/{part}")
        log(f"recorded steps {self._began_with} to {step}: see {self._folder}/summary.txt")

    @property
    def _folder(self) -> str:
        return "profile" if self.rank == 0 else f"profile/rank-{self.rank}"


def summarise(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return how many seconds the profiled steps spent on each activity, computed from the events
    of a trace. Time between two steps, such as an evaluation, is not counted.

    `overlap_s` is included in both compute and communication; `other_s` is the rest of `wall_s`:
    Python, kernel launches, and waiting for slower ranks. Computation during the wait for data,
    such as collating a batch, counts only as waiting for data.
    """
    spans: dict[str, list[Span]] = {"step": [], "data": [], "compute": [], "communication": []}
    has_gpu = False
    for event in events:
        if event.get("ph") != "X":
            continue
        kind = _kind(str(event.get("cat")), str(event["name"]))
        if kind is None:
            continue
        if kind == "gpu compute" and not has_gpu:
            has_gpu = True
            spans["compute"].clear()  # with a GPU, the CPU only launches kernels
        if kind == "compute" and has_gpu:
            continue
        begin = float(event["ts"])
        spans[kind.removeprefix("gpu ")].append((begin, begin + float(event["dur"])))
    steps = union(spans["step"])
    waiting = common(union(spans["data"]), steps)
    compute, exchange = (
        common(without(union(spans[kind]), waiting), steps) for kind in ("compute", "communication")
    )
    seconds = {
        "wall_s": length(steps) / 1e6,
        "compute_s": length(compute) / 1e6,
        "communication_s": length(exchange) / 1e6,
        "overlap_s": length(common(compute, exchange)) / 1e6,
        "data_wait_s": length(waiting) / 1e6,
    }
    known = union([*compute, *exchange, *waiting])
    return {**seconds, "other_s": seconds["wall_s"] - length(known) / 1e6}


def _kind(category: str, name: str) -> str | None:
    """Return the category to which an event of a trace belongs; None if the event is not
    counted."""
    if name in (STEP, DATA):
        return name.removeprefix("dray.") if category == "user_annotation" else None
    if category in ("kernel", "gpu_memcpy", "gpu_memset"):
        return "communication" if "nccl" in name.lower() else "gpu compute"
    if category == "user_annotation" and name.startswith("gloo:"):
        return "communication"
    return "compute" if category == "cpu_op" and name.startswith("aten::") else None


def union(spans: Sequence[Span]) -> list[Span]:
    """Merge spans into disjoint, ordered spans that cover the same time."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return the total length of disjoint spans."""
    return sum(end - begin for begin, end in spans)


def common(ours: Sequence[Span], theirs: Sequence[Span]) -> list[Span]:
    """Return the intersection of two lists of disjoint, ordered spans, also as disjoint, ordered
    spans."""
    found = []
    at = 0
    for begin, end in ours:
        while at < len(theirs) and theirs[at][1] <= begin:
            at += 1
        for other_begin, other_end in theirs[at:]:
            if other_begin >= end:
                break
            found.append((max(begin, other_begin), min(end, other_end)))
    return found


def without(ours: Sequence[Span], theirs: Sequence[Span]) -> list[Span]:
    """Return the time that is in `ours` but not in `theirs`. The spans in each sequence are ordered
    and disjoint."""
    edges = [-math.inf, *(edge for span in theirs for edge in span), math.inf]
    return common(ours, list(zip(edges[::2], edges[1::2], strict=True)))


def top_operators(averages: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the operators with the most self time, on the GPU if the process has one.

    torch's list also contains kernels, whose time is included in the time of the operators that
    launched them, and ranges named by the program; both are omitted.
    """
    found = [
        {
            "name": each.key,
            "calls": int(each.count),
            "self_s": each.self_cpu_time_total / 1e6,
            "self_gpu_s": each.self_device_time_total / 1e6,
        }
        for each in averages
        if each.device_type.name == "CPU" and _is_operator(each)
    ]
    found.sort(key=lambda each: (each["self_gpu_s"], each["self_s"]), reverse=True)
    return found[:NUM_TOP]


def _is_operator(average: Any) -> bool:
    # gloo records its operations as named ranges instead of operators.
    return average.key.startswith("gloo:") or not average.is_user_annotation


def table(summary: Mapping[str, Any]) -> str:
    """Format the summary as text."""
    first, last = summary["steps"]
    wall_s = summary["wall_s"]
    lines = [f"steps {first} to {last}: {wall_s * 1e3 / (last - first + 1):.2f} ms each", ""]
    rows = {
        "compute": "compute_s",
        "communication": "communication_s",
        "of which both at once": "overlap_s",
        "waiting for data": "data_wait_s",
        "everything else": "other_s",
    }
    for name, key in rows.items():
        share = summary[key] / wall_s
        lines.append(f"{name:24}{summary[key] * 1e3:10.2f} ms {share:7.1%}")
    lines += ["", f"{'operator':48}{'calls':>8}{'CPU ms':>12}{'GPU ms':>12}"]
    lines += [
        f"{each['name'][:47]:48}{each['calls']:8}{each['self_s'] * 1e3:12.2f}"
        f"{each['self_gpu_s'] * 1e3:12.2f}"
        for each in summary["top"]
    ]
    return "\n".join(lines) + "\n"
