"""Computes media from arrays: histograms, confusion matrices, curves, pictures and audio. An array
is anything that numpy can convert, or a tensor of torch. Requires numpy."""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dray.media.kinds import MAX_BINS, MAX_CLASSES, MAX_CURVE_POINTS, MAX_PIXELS

Array = npt.NDArray[Any]

BINS: Final = 64
_PNG_COLOURS: Final = {1: 0, 2: 4, 3: 2, 4: 6}
"""PNG's colour type by number of channels: grey, grey with alpha, RGB, RGBA."""


def as_array(given: Any) -> Array:
    """Return an array of numbers. Raises TypeError if the value contains anything else."""
    if hasattr(given, "detach"):  # a tensor of torch
        given = given.detach().cpu()
        given = (given.float() if str(given.dtype) == "torch.bfloat16" else given).numpy()
    array = np.asarray(given)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"expected an array of real numbers, not {type(given).__name__}")
    return array


def histogram(given: Any) -> dict[str, Any]:
    """Return the histogram of all elements, or of `(counts, edges)` as numpy.histogram returns it.

    NaN and infinities are counted separately."""
    if isinstance(given, tuple):
        return _counted(*given)
    if hasattr(given, "detach") and given.is_floating_point():
        return _histogram_on_device(given.detach())
    values = as_array(given).ravel()
    values = values.astype(np.float64)
    finite = values[np.isfinite(values)]
    if not finite.size:
        raise ValueError("the histogram has no finite values")
    counts, edges = np.histogram(finite, bins=_edges(float(finite.min()), float(finite.max())))
    return _histogram(counts, edges, values.size - finite.size)


def _histogram_on_device(tensor: Any) -> dict[str, Any]:
    """Count a tensor's elements on its own device, so that only the counts are copied."""
    values = tensor.flatten()
    if values.element_size() < 4:  # torch has few operations on small floats
        values = values.float()
    finite = values[values.isfinite()]
    if not finite.numel():
        raise ValueError("the histogram has no finite values")
    edges = _edges(float(finite.min()), float(finite.max()))
    width = float(edges[-1] - edges[0])
    if not 1e-30 < width < 1e30:  # out of range for 32-bit arithmetic
        finite = finite.double()
    counts = finite.histc(bins=BINS, min=float(edges[0]), max=float(edges[-1]))
    return _histogram(counts.cpu().numpy(), edges, values.numel() - finite.numel())


def _edges(low: float, high: float) -> Array:
    """Return the edges of bins of equal width."""
    if low == high:
        low, high = low - max(0.5, abs(low) * 1e-6), high + max(0.5, abs(high) * 1e-6)
    # Scaled, because the difference of two large numbers can be infinite.
    edges = np.linspace(low / 2, high / 2, BINS + 1) * 2
    if not (np.isfinite(edges).all() and (np.diff(edges) > 0).all()):
        raise ValueError(f"the values from {low:g} to {high:g} can't be divided into {BINS} bins")
    return edges


def _counted(counts: Any, edges: Any) -> dict[str, Any]:
    counts, edges = as_array(counts), as_array(edges)
    if counts.ndim != 1 or edges.shape != (counts.size + 1,) or not 0 < counts.size <= MAX_BINS:
        raise ValueError(
            f"a histogram must have 1 to {MAX_BINS} counts, and one edge more than counts"
        )
    if not np.isfinite(edges).all() or (np.diff(edges) <= 0).any():
        raise ValueError("the edges of a histogram must increase")
    return _histogram(_counts(counts), edges, 0)


def _histogram(counts: Array, edges: Array, num_left_out: int) -> dict[str, Any]:
    return {
        "counts": [int(count) for count in counts],
        "edges": [float(edge) for edge in edges],
        "not_finite": int(num_left_out),
    }


def _counts(given: Array) -> Array:
    is_whole = np.isfinite(given).all() and (given == np.floor(given)).all()
    if not (is_whole and (given >= 0).all() and (given <= np.float64(2**53)).all()):
        raise ValueError("counts must be whole numbers from 0 to 2**53, not densities")
    return given.astype(np.int64)


def confusion_matrix(given: Any, classes: Sequence[str] | None) -> dict[str, Any]:
    """Return the counts for `(labels, predictions)`, which are numbers of classes, or for a square
    array of counts whose rows are the true classes."""
    if isinstance(given, tuple):
        labels, predictions = (as_array(one).ravel() for one in given)
        if labels.shape != predictions.shape:
            raise ValueError(
                f"there are {labels.size} labels, but {predictions.size} predictions: pass one "
                "prediction for each label"
            )
        both = np.concatenate([labels, predictions])
        if not both.size and classes is None:
            raise ValueError("the confusion matrix has no labels")
        if not (np.isfinite(both).all() and (both == np.floor(both)).all() and (both >= 0).all()):
            raise ValueError("labels and predictions must be the numbers of classes, from 0")
        highest = float(both.max()) if both.size else -1.0
        size = int(min(highest, 2**53)) + 1 if classes is None else len(classes)
        if highest >= size:
            raise ValueError(f"class {highest:g} has no name: there are {size} names of classes")
        _check_classes(size)
        cells = labels.astype(np.int64) * size + predictions.astype(np.int64)
        counts = np.bincount(cells, minlength=size * size).reshape(size, size)
    else:
        counts = _counts(as_array(given))
        if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
            raise ValueError(f"counts must be a square array, not an array of {counts.shape}")
        size = counts.shape[0]
        _check_classes(size)
        if classes is not None and len(classes) != size:
            raise ValueError(f"there are {size} classes, but {len(classes)} names of classes")
    names = [str(number) for number in range(size)] if classes is None else list(classes)
    return {"classes": names, "counts": counts.tolist()}


def _check_classes(size: int) -> None:
    if not 0 < size <= MAX_CLASSES:
        raise ValueError(f"a confusion matrix must have 1 to {MAX_CLASSES} classes, not {size}")


def pr_curve(labels: Any, scores: Any) -> dict[str, Any]:
    """Return precision over recall for each threshold, and the average precision: the sum over
    thresholds of the precision times the increase of the recall."""
    true, false, thresholds, positives, negatives = _by_threshold(labels, scores)
    if not positives:
        raise ValueError("the curve has no positive labels")
    recall, precision = true / positives, true / (true + false)
    area = float(np.sum(np.diff(recall, prepend=0.0) * precision))
    # As in scikit-learn, the curve begins at recall 0 with precision 1.
    return _curve(
        np.append(0.0, recall), np.append(1.0, precision), thresholds, area, positives, negatives
    )


def roc_curve(labels: Any, scores: Any) -> dict[str, Any]:
    """Return the true positive rate over the false positive rate for each threshold, and the area
    under the curve."""
    true, false, thresholds, positives, negatives = _by_threshold(labels, scores)
    if not positives or not negatives:
        raise ValueError("the curve needs positive and negative labels")
    x, y = np.append(0.0, false / negatives), np.append(0.0, true / positives)
    area = float(np.sum(np.diff(x) * (y[1:] + y[:-1]) / 2))
    return _curve(x, y, thresholds, area, positives, negatives)


def _by_threshold(labels: Any, scores: Any) -> tuple[Array, Array, Array, int, int]:
    """Return, for each different score in descending order, the numbers of true and false positives
    with at least this score, and this score; then the numbers of positive and negative labels."""
    of_labels, of_scores = as_array(labels).ravel(), as_array(scores).ravel().astype(np.float64)
    if of_labels.shape != of_scores.shape:
        raise ValueError(
            f"there are {of_labels.size} labels, but {of_scores.size} scores: pass one score, that "
            "of the positive class, for each label"
        )
    if not np.isin(of_labels, (0, 1)).all():
        raise ValueError("the labels of a curve must be 0 or 1")
    if not np.isfinite(of_scores).all():
        raise ValueError("the scores of a curve must be finite")
    order = np.argsort(-of_scores, kind="stable")
    ordered, is_positive = of_scores[order], of_labels[order].astype(bool)
    # The last of equal scores, which is before a different score or at the end.
    last = np.flatnonzero(np.append(np.diff(ordered) != 0, True)[: ordered.size])
    true = np.cumsum(is_positive)[last]
    false = np.cumsum(~is_positive)[last]
    positives = int(is_positive.sum())
    return true, false, ordered[last], positives, ordered.size - positives


def _curve(
    x: Array, y: Array, thresholds: Array, area: float, positives: int, negatives: int
) -> dict[str, Any]:
    """Return the curve with at most `MAX_CURVE_POINTS` points: the first and last point, and points
    at equal distances along the curve. The area is computed from all points."""
    chosen = np.arange(x.size)
    if x.size > MAX_CURVE_POINTS:
        along = np.cumsum(np.abs(np.diff(x, prepend=x[0])) + np.abs(np.diff(y, prepend=y[0])))
        wanted = np.linspace(0, along[-1], MAX_CURVE_POINTS)
        chosen = np.unique(np.append(np.searchsorted(along, wanted)[:-1], x.size - 1))
    return {
        "x": x[chosen].tolist(),
        "y": y[chosen].tolist(),
        # No score reaches the first point of the curve.
        "thresholds": [None if at == 0 else float(thresholds[at - 1]) for at in chosen],
        "area": area,
        "positives": positives,
        "negatives": negatives,
    }


def png(given: Any) -> bytes:
    """Encode an array as PNG: height x width, or with 1 to 4 channels as the last or first axis.
    Floats are from 0 (black) to 1, integers from 0 to 255; values outside are clipped."""
    array = as_array(given)
    if array.ndim == 2:
        array = array[..., None]
    has_channels_first = array.ndim == 3 and array.shape[0] in _PNG_COLOURS
    if has_channels_first and (hasattr(given, "detach") or array.shape[2] not in _PNG_COLOURS):
        array = np.moveaxis(array, 0, 2)
    if array.ndim != 3 or array.shape[2] not in _PNG_COLOURS or 0 in array.shape:
        raise ValueError(
            "a picture must be an array of height x width, with at most 4 channels as the first or "
            f"last axis, not of shape {as_array(given).shape}"
        )
    height, width, channels = array.shape
    if height * width > MAX_PIXELS:
        raise ValueError(
            f"the picture has {width} x {height} pixels, but at most {MAX_PIXELS:,} are stored"
        )
    if array.dtype.kind == "b":
        array = array * np.uint8(255)
    elif array.dtype.kind == "f":
        array = np.rint(np.nan_to_num(array.astype(np.float64), nan=0.0) * 255)
    pixels = np.clip(array, 0, 255).astype(np.uint8).reshape(height, -1)
    # Each row begins with the number of its filter: 2, the difference from the row above.
    rows = np.full((height, 1 + pixels.shape[1]), 2, np.uint8)
    rows[0, 1:] = pixels[0]
    rows[1:, 1:] = pixels[1:] - pixels[:-1]
    header = struct.pack(">IIBBBBB", width, height, 8, _PNG_COLOURS[channels], 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 3)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in parts)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def wav(given: Any, sample_rate: Any) -> bytes:
    """Encode samples as a WAV file with 16 bits: a sequence, or an array with one row or column for
    each channel. Floats are from -1 to 1, integers 16 bits; values outside are clipped."""
    array = as_array(given)
    rate = int(sample_rate)
    if array.ndim == 1:
        array = array[:, None]
    elif array.ndim == 2 and array.shape[0] < array.shape[1]:
        array = array.T
    if array.ndim != 2 or not array.size or array.shape[1] > 8 or not 0 < rate <= 384_000:
        raise ValueError(
            "audio must be samples of 1 to 8 channels with 1 to 384000 samples per second, not of "
            f"shape {array.shape} with {sample_rate}"
        )
    if array.dtype.kind == "f":
        array = np.rint(np.nan_to_num(array.astype(np.float64), nan=0.0) * 32767)
    samples = np.clip(array, -32768, 32767).astype("<i2")
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return target.getvalue()
