"""Recording some steps, and saying where their time went."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from dray import spec, train
from ray_workers.training.checkpoints import log

STEP = "dray.step"
NUM_TOP = 15

Span = tuple[float, float]
"""[begin, end), in microseconds of the trace's own clock."""


class Recorder:
    """Records the steps that a document asks for, on the rank that it is given to."""

    def __init__(self, options: spec.Profile, device: torch.device) -> None:
        self._first = options.at_step
        self._last = options.at_step + options.num_steps - 1
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: Any = None
        self._step: Any = None
        self._began_with = 0
        self._data_wait_s = 0.0
        self._is_done = False

    def begin_step(self, step: int) -> None:
        if self._is_done or not self._first <= step <= self._last:
            return
        if self._profile is None:
            self._profile = profile(activities=self._activities)
            self._profile.start()
            self._began_with, self._data_wait_s = step, 0.0
        self._step = record_function(STEP)
        self._step.__enter__()

    def end_step(self, step: int, data_wait_s: float) -> None:
        """The last of the steps leaves the artifacts."""
        if self._step is None:
            return
        if ProfilerActivity.CUDA in self._activities:
            torch.cuda.synchronize()  # what was launched belongs to the step
        self._step.__exit__(None, None, None)
        self._step = None
        self._data_wait_s += data_wait_s
        if step >= self._last:
            self._leave(step)

    def break_off(self) -> None:
        """The group broke: what was recorded of it is let go of."""
        if self._profile is not None:
            self._profile.stop()
        self._profile = self._step = None

    def finish(self, steps_done: int) -> None:
        """The training is over: leave what was recorded, or say that the steps never came."""
        if self._profile is not None:
            self._leave(steps_done)
        elif not self._is_done:
            log(
                f"nothing was recorded: profile asks for steps {self._first} to {self._last}, and "
                f"this attempt ended with step {steps_done}"
            )

    def _leave(self, step: int) -> None:
        """Leave the artifacts of the steps up to this one."""
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
                **summarise(events, self._data_wait_s),
                "top": top_operators(self._profile.key_averages()),
            }
            (folder / "trace.json.gz").write_bytes(gzip.compress(trace.read_bytes(), 6))
            (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
            (folder / "summary.txt").write_text(table(summary))
            for part in ("trace.json.gz", "summary.json", "summary.txt"):
                train.save_artifact(folder / part, f"profile/{part}")
        log(f"recorded steps {self._began_with} to {step}: profile/summary.txt tells of them")


def summarise(events: Iterable[Mapping[str, Any]], data_wait_s: float) -> dict[str, float]:
    """Seconds of the recorded steps by what they went into, from a trace's events.

    `overlap_s` counts in both compute and communication; `other_s` is what is left of `wall_s`:
    Python, launches, and waiting for ranks that are behind.
    """
    spans: dict[str, list[Span]] = {"step": [], "compute": [], "communication": []}
    has_gpu = False
    for event in events:
        if event.get("ph") != "X":
            continue
        kind = _kind(str(event.get("cat")), str(event["name"]))
        if kind is None:
            continue
        if kind == "gpu compute" and not has_gpu:
            has_gpu = True
            spans["compute"].clear()  # the processor's part is to launch, then
        if kind == "compute" and has_gpu:
            continue
        begin = float(event["ts"])
        spans[kind.removeprefix("gpu ")].append((begin, begin + float(event["dur"])))
    whole = (min(s[0] for s in spans["step"]), max(s[1] for s in spans["step"]))
    compute = union([_within(span, whole) for span in spans["compute"]])
    exchange = union([_within(span, whole) for span in spans["communication"]])
    wall_s = (whole[1] - whole[0]) / 1e6
    busy_s = length(union([*compute, *exchange])) / 1e6
    both_s = (length(compute) + length(exchange)) / 1e6 - busy_s
    return {
        "wall_s": wall_s,
        "compute_s": length(compute) / 1e6,
        "communication_s": length(exchange) / 1e6,
        "overlap_s": both_s,
        "data_wait_s": data_wait_s,
        "other_s": max(0.0, wall_s - busy_s - data_wait_s),
    }


def _kind(category: str, name: str) -> str | None:
    """What a trace's event counts as."""
    if name == STEP:
        return "step" if category == "user_annotation" else None
    if category in ("kernel", "gpu_memcpy", "gpu_memset"):
        return "communication" if "nccl" in name.lower() else "gpu compute"
    if category == "user_annotation" and name.startswith("gloo:"):
        return "communication"
    return "compute" if category == "cpu_op" and name.startswith("aten::") else None


def union(spans: Sequence[Span]) -> list[Span]:
    """The same times in spans that do not touch, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """Of spans that do not overlap."""
    return sum(end - begin for begin, end in spans)


def _within(span: Span, whole: Span) -> Span:
    begin = min(max(span[0], whole[0]), whole[1])
    return begin, max(begin, min(span[1], whole[1]))


def top_operators(averages: Iterable[Any]) -> list[dict[str, Any]]:
    """The operators that took most time by themselves, on a GPU where there is one."""
    found = [
        {
            "name": each.key,
            "calls": int(each.count),
            "self_s": each.self_cpu_time_total / 1e6,
            "self_gpu_s": each.self_device_time_total / 1e6,
        }
        for each in averages
        if each.key != STEP
    ]
    found.sort(key=lambda each: (each["self_gpu_s"], each["self_s"]), reverse=True)
    return found[:NUM_TOP]


def table(summary: Mapping[str, Any]) -> str:
    """The summary for people."""
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
