"""Curves of runs: their positions on the x axis, smoothing, and colours.

The web page computes the same in api/page/static/lib: axes.js, series.js, smoothing.js, colours.js.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from service.domain.series import Points

NUM_COLOURS = 20
DASHED_FROM = 10
"""Curves with this colour or a later one are drawn dashed."""
COUNTERS = {
    "epoch": ("epoch", "train/epoch"),
    "samples": ("samples", "train/samples"),
    "tokens": ("tokens", "train/tokens"),
}
"""Metrics that a job can report as positions on these axes."""
SENT_BYTES = "sync/sent_bytes"
_PARTS = 200

Position = Callable[[int], float]
"""A function from a step to a position on the x axis."""


def keys_for(axis: str) -> tuple[str, ...]:
    """Return the metrics from which the positions on the axis are computed."""
    return COUNTERS.get(axis, (SENT_BYTES,) if axis == "bytes" else ())


def position_on(
    axis: str, series: Mapping[str, Points], spec: Mapping[str, Any], total_steps: int | None
) -> Position | None:
    """Return the function from a job's steps to positions on the axis, other than time; None if the
    job's data doesn't have the axis."""
    if axis == "step":
        return float
    if axis == "bytes":
        return _sent(*series.get(SENT_BYTES, ([], [])))
    for key in COUNTERS[axis]:
        if len(series.get(key, ((), ()))[0]) > 1:
            return straight(*series[key])
    return _computed(axis, spec, total_steps)


def _computed(axis: str, spec: Mapping[str, Any], total_steps: int | None) -> Position | None:
    """Compute epochs, samples and tokens of a recipe from the job's document. A federated job
    counts rounds."""
    if not spec.get("recipe") or spec.get("federated"):
        return None
    train, model = spec.get("train") or {}, spec.get("model") or {}
    if axis == "epoch":
        # Without these fields, the job ends after whole epochs.
        if train.get("max_steps") or train.get("early_stopping") or not total_steps:
            return None
        epochs = train.get("epochs")
        return None if epochs is None else lambda step: step * epochs / total_steps
    batch_range = train.get("batch_range")
    samples = batch_range[0] if batch_range else train.get("global_batch_size")
    if axis == "tokens":
        length = model.get("context_length") if model.get("name") == "gpt" else None
        samples = samples * length if samples and length else None
    return None if samples is None else lambda step: float(step * samples)


def _sent(steps: Sequence[int], values: Sequence[float]) -> Position | None:
    """Return the bytes that all ranks have sent by a step. The metric is the mean per step since
    the previous point."""
    known, sent = [0], [0.0]
    for step, value in zip(steps, values, strict=True):
        if step > known[-1]:
            sent.append(sent[-1] + (step - known[-1]) * value)
            known.append(step)
    return straight(known, sent) if len(known) > 1 else None


def straight(steps: Sequence[int], values: Sequence[float]) -> Position | None:
    """Return the linear interpolation and extrapolation of the finite values; None if there are
    fewer than two."""
    known = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if len(known) < 2:
        return None
    xs = [step for step, _ in known]

    def at(step: int) -> float:
        i = min(max(1, bisect_left(xs, step, 1)), len(xs) - 1)
        (a, low), (b, high) = known[i - 1], known[i]
        return low + (step - a) / (b - a) * (high - low)

    return at


def smoothed(xs: Sequence[float], ys: Sequence[float], weight: float) -> list[float]:
    """Return a bias-corrected exponential moving average, whose window is a part of the range of x.
    Values that are not finite remain, and don't affect the others."""
    width = xs[-1] - xs[0] if xs else 0.0
    if not weight or not width:
        return list(ys)
    mean = norm = 0.0
    before = xs[0]
    found = []
    for x, y in zip(xs, ys, strict=True):
        if not math.isfinite(y):
            found.append(y)
            continue
        kept = weight ** ((_PARTS * (x - before)) / width or 1.0)
        before = x
        mean = kept * mean + (1 - kept) * y
        norm = kept * norm + (1 - kept)
        found.append(mean / norm if norm else y)
    return found


class Coloured(Protocol):
    """A run with the properties that determine its colour."""

    id: str
    array_id: str | None
    array_index: int | None
    colour: int | None


def colours_of(runs: Iterable[Coloured]) -> dict[str, int]:
    """Return the number of each run's colour, by id: the colour that a user chose, or one that is
    derived from the id. Up to twenty runs have different colours, unless users chose equal ones."""
    runs = list(runs)
    found = {run.id: run.colour % NUM_COLOURS for run in runs if run.colour is not None}
    taken = set(found.values())
    for run in runs:
        if run.id in found:
            continue
        first = _preferred(run)
        order = [(first + n) % DASHED_FROM + n // DASHED_FROM * DASHED_FROM for n in range(20)]
        found[run.id] = next((one for one in order if one not in taken), order[-1])
        taken.add(found[run.id])
    return found


def _preferred(run: Coloured) -> int:
    if run.array_id is not None and run.array_index is not None:
        return (_hash(run.array_id) + run.array_index) % DASHED_FROM
    return _hash(run.id) % DASHED_FROM


def _hash(text: str) -> int:
    """Return the FNV-1a hash (32 bits) of the text, whose characters are ASCII."""
    found = 0x811C9DC5
    for character in text:
        found = (found ^ ord(character)) * 0x01000193 % 2**32
    return found


class Named(Protocol):
    """A run with the properties that distinguish it from others."""

    id: str
    name: str
    variant: str | None
    array_id: str | None


def names_of(runs: Sequence[Named]) -> dict[str, str]:
    """Return the shortest names that distinguish the runs, by id: the variants of trials of one
    sweep, otherwise names with variants, with the end of the id if two are equal."""
    arrays = {run.array_id for run in runs}
    is_one_array = len(runs) > 1 and len(arrays) == 1 and all(run.variant for run in runs)
    is_one_array = is_one_array and None not in arrays
    texts = {
        run.id: (run.variant or "")
        if is_one_array
        else " ".join(filter(None, (run.name or run.id, run.variant)))
        for run in runs
    }
    counts: dict[str, int] = {}
    for text in texts.values():
        counts[text] = counts.get(text, 0) + 1
    return {
        each: f"{text} (…{each[-4:]})" if counts[text] > 1 and text != each else text
        for each, text in texts.items()
    }
