"""What a script reports is converted to the numbers that slow loops, numpy, scikit-learn and Pillow
compute."""

from __future__ import annotations

import io
import json
import math
import random
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pictures
from sklearn import metrics

from dray.media.kinds import MAX_CURVE_POINTS, MAX_FILE_BYTES, MAX_ROWS, MediaKind
from dray.media.values import convert
from service.ingest.media_checks import checked
from tests.unit.media import files

SEEDS = range(10)


def value_of(kind: MediaKind, given: Any) -> dict[str, Any]:
    """Return the value as the service stores it."""
    converted = convert(kind, given)
    sent = json.loads(json.dumps(converted.value))
    return checked(kind, sent, converted.content).value


def content_of(kind: MediaKind, given: Any) -> bytes:
    content = convert(kind, given).content
    assert content is not None
    return content


@pytest.mark.parametrize("seed", SEEDS)
def test_histograms_are_those_of_numpy(seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = draw.normal(draw.normal(), 10.0 ** draw.integers(-6, 7), draw.integers(1, 3000))
    values[draw.random(values.size) < 0.1] = draw.choice([np.nan, np.inf, -np.inf])
    values[0] = 1.0
    found = value_of(MediaKind.HISTOGRAM, values.reshape(-1, 1))
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, bins=64)
    assert np.allclose(found["edges"], edges, rtol=1e-12, atol=1e-12 * np.ptp(edges))
    assert sum(found["counts"]) == finite.size
    # A value at an edge can be rounded into the bin beside it.
    assert np.abs(np.cumsum(found["counts"]) - np.cumsum(counts)).max() <= 1
    assert found["not_finite"] == values.size - finite.size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_histograms_of_tensors_are_counted_where_they_are(dtype: torch.dtype) -> None:
    draw = np.random.default_rng(3)
    # Sums of 64ths, which all types represent exactly, so that no value is rounded to another bin.
    values = np.append(draw.integers(0, 64, 5000) / 64 + 1 / 128, [0.0, 1.0])
    tensor = torch.tensor(np.append(values, [np.nan, np.inf]), dtype=dtype, requires_grad=True)
    found = value_of(MediaKind.HISTOGRAM, tensor)
    assert found["counts"] == np.histogram(values, bins=64, range=(0, 1))[0].tolist()
    assert found["not_finite"] == 2


@pytest.mark.parametrize(
    "values",
    [[7], [0.0, 0.0], [1e300, -1e300], [5e-324, 1.0], [1e20] * 3, np.array([True, False])],
    ids=str,
)
def test_any_range_of_numbers_has_a_histogram(values: Any) -> None:
    found = value_of(MediaKind.HISTOGRAM, values)
    assert sum(found["counts"]) == len(values)
    assert found["edges"][0] <= min(values) <= max(values) <= found["edges"][-1]


def test_a_tensor_with_the_largest_floats_has_a_histogram() -> None:
    found = value_of(MediaKind.HISTOGRAM, torch.tensor([-3.4e38, 0.0, 3.4e38]))
    assert sum(found["counts"]) == 3


def test_small_floats_have_a_histogram() -> None:
    found = value_of(MediaKind.HISTOGRAM, torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn))
    assert (sum(found["counts"]), found["edges"][0], found["edges"][-1]) == (2, 0.5, 2.0)


def test_counts_and_edges_of_numpy_are_taken() -> None:
    found = value_of(MediaKind.HISTOGRAM, np.histogram([1, 2, 3, 3], bins=[0, 2, 3.5]))
    assert found["counts"] == [1, 3]
    assert found["edges"] == [0, 2, 3.5]


@pytest.mark.parametrize("seed", SEEDS)
def test_confusion_matrices_are_those_of_a_loop(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 12)
    pairs = [(draw.randrange(size), draw.randrange(size)) for _ in range(draw.randint(1, 200))]
    labels, predictions = zip(*pairs, strict=True)
    counted = [[pairs.count((true, said)) for said in range(size)] for true in range(size)]
    names = [f"class {number}" for number in range(size)]
    found = value_of(
        MediaKind.CONFUSION_MATRIX, (torch.tensor(labels), np.array(predictions), names)
    )
    assert found["counts"] == counted
    assert found["classes"] == names
    assert value_of(MediaKind.CONFUSION_MATRIX, counted)["counts"] == counted
    with_names = {"counts": np.array(counted), "classes": names}
    assert value_of(MediaKind.CONFUSION_MATRIX, with_names) == found


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "uint64", "float16"])
def test_labels_of_any_type_are_counted(dtype: str) -> None:
    labels, predictions = np.array([1, 0, 1], dtype), np.array([1, 1, 1], dtype)
    found = value_of(MediaKind.CONFUSION_MATRIX, (labels, predictions))
    assert found["counts"] == [[0, 1], [0, 2]]


def slow_curve(labels: list[int], scores: list[float]) -> list[tuple[float, int, int]]:
    """Return (threshold, true positives, false positives) of each threshold, the highest first."""
    return [
        (
            least,
            sum(label for label, score in zip(labels, scores, strict=True) if score >= least),
            sum(1 - label for label, score in zip(labels, scores, strict=True) if score >= least),
        )
        for least in sorted(set(scores), reverse=True)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_curves_are_those_of_a_slow_loop(seed: int) -> None:
    draw = random.Random(seed)
    number = draw.randint(2, 150)
    labels = [1, 0, *(draw.randrange(2) for _ in range(number - 2))]
    digits = draw.choice([1, 6])  # with one digit, many scores are equal
    scores = [round(draw.random() + 0.3 * label, digits) for label in labels]
    positives, negatives = sum(labels), number - sum(labels)
    expected = slow_curve(labels, scores)
    roc = value_of(
        MediaKind.ROC_CURVE, (np.array(labels), torch.tensor(scores, dtype=torch.float64))
    )
    assert roc["x"] == [0.0, *(false / negatives for _, _, false in expected)]
    assert roc["y"] == [0.0, *(true / positives for _, true, _ in expected)]
    assert roc["thresholds"] == [None, *(least for least, _, _ in expected)]
    assert roc["area"] == pytest.approx(metrics.roc_auc_score(labels, scores))
    pr = value_of(MediaKind.PR_CURVE, (labels, scores))
    assert pr["x"] == [0.0, *(true / positives for _, true, _ in expected)]
    assert pr["y"] == [1.0, *(true / (true + false) for _, true, false in expected)]
    assert pr["area"] == pytest.approx(metrics.average_precision_score(labels, scores))
    assert (pr["positives"], pr["negatives"]) == (positives, negatives)


def test_long_curves_keep_their_area_and_their_ends() -> None:
    draw = np.random.default_rng(5)
    labels = draw.integers(0, 2, 20_000)
    scores = draw.random(20_000) + 0.5 * labels
    for kind, area in (
        (MediaKind.ROC_CURVE, metrics.roc_auc_score(labels, scores)),
        (MediaKind.PR_CURVE, metrics.average_precision_score(labels, scores)),
    ):
        found = value_of(kind, (labels, scores))
        assert 50 < len(found["x"]) <= MAX_CURVE_POINTS
        assert found["area"] == pytest.approx(area)
        assert (found["x"][0], found["x"][-1]) == (0.0, 1.0)
        # The curve that is drawn is close to the curve of all points.
        drawn = np.trapezoid(found["y"], found["x"])
        assert drawn == pytest.approx(area, abs=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_pictures_are_those_that_pillow_reads(seed: int) -> None:
    draw = np.random.default_rng(seed)
    height, width, channels = draw.integers(1, 40), draw.integers(5, 40), draw.integers(1, 5)
    pixels = draw.integers(0, 256, (height, width, channels), dtype=np.uint8)
    given: Any = pixels
    if seed % 4 == 1:
        given = pixels / 255
    elif seed % 4 == 2:
        given = torch.tensor(pixels).movedim(2, 0)
    elif seed % 4 == 3:
        given = torch.tensor(pixels / 255, dtype=torch.float32).movedim(2, 0)
    content = content_of(MediaKind.IMAGE, given)
    read = np.asarray(Pictures.open(io.BytesIO(content)))
    assert np.array_equal(read.reshape(pixels.shape), pixels)
    value = value_of(MediaKind.IMAGE, given)
    assert (value["width"], value["height"]) == (width, height)
    assert value["file"]["size_bytes"] == len(content)


def test_values_outside_of_a_picture_are_clipped() -> None:
    given = np.array([[-1.0, 0.5, 2.0, np.nan]])
    read = np.asarray(Pictures.open(io.BytesIO(content_of(MediaKind.IMAGE, given))))
    assert read.tolist() == [[0, 128, 255, 0]]
    given = np.array([[-5, 300, 7]])
    read = np.asarray(Pictures.open(io.BytesIO(content_of(MediaKind.IMAGE, given))))
    assert read.tolist() == [[0, 255, 7]]


def test_pictures_of_pillow_of_matplotlib_and_of_files_are_taken(tmp_path: Path) -> None:
    content = files.picture("JPEG")
    (tmp_path / "a.jpg").write_bytes(content)
    for given in (content, bytearray(content), tmp_path / "a.jpg", str(tmp_path / "a.jpg")):
        assert content_of(MediaKind.IMAGE, given) == content

    class Figure:
        def savefig(self, target: io.BytesIO, **options: str) -> None:
            target.write(files.picture(options["format"].upper()))

    assert content_of(MediaKind.IMAGE, Figure()) == files.picture()
    for mode in ("1", "P", "CMYK", "RGBA"):
        opened = Pictures.new(mode, (3, 2))
        read = Pictures.open(io.BytesIO(content_of(MediaKind.IMAGE, opened)))
        assert read.size == (3, 2)


@pytest.mark.parametrize("channels", [1, 2])
def test_sounds_are_those_that_wave_reads(channels: int) -> None:
    draw = np.random.default_rng(channels)
    samples = draw.integers(-(2**15), 2**15, (50, channels), dtype=np.int16)
    for given in (samples, samples.T, torch.tensor(samples), samples / 32767):
        content = content_of(MediaKind.AUDIO, (given, 16_000))
        with wave.open(io.BytesIO(content)) as file:
            assert (file.getnchannels(), file.getframerate()) == (channels, 16_000)
            read = np.frombuffer(file.readframes(50), "<i2").reshape(50, channels)
        assert np.abs(read - samples.astype(int)).max() <= (1 if given.dtype == float else 0)
    value = value_of(MediaKind.AUDIO, (samples, 16_000))
    assert value["seconds"] == 50 / 16_000


def test_tables_have_the_same_cells_in_each_form() -> None:
    pandas = pytest.importorskip("pandas", reason="the extra 'frames' is not installed: pandas")
    rows = [{"name": "a", "loss": 0.5, "right": True}, {"name": "b\0", "loss": math.nan}]
    value = value_of(MediaKind.TABLE, rows)
    assert value["columns"] == ["name", "loss", "right"]
    assert value["rows"] == [["a", 0.5, True], ["b␀", "nan", None]]
    columns = {"name": ["a", "b\0"], "loss": np.array([0.5, np.nan]), "right": [True, None]}
    assert value_of(MediaKind.TABLE, columns) == value
    frame = pandas.DataFrame({"n": [1, 2], "x": np.array([0.25, 7], dtype=np.float32)})
    assert value_of(MediaKind.TABLE, frame)["rows"] == [[1, 0.25], [2, 7.0]]


def test_what_is_too_long_is_cut_and_counted() -> None:
    found = value_of(MediaKind.TABLE, {"a": range(5000), "b": [torch.tensor(1)] * 5000})
    assert (len(found["rows"]), found["num_rows"]) == (MAX_ROWS, 5000)
    assert found["rows"][7] == [7, 1]
    found = value_of(MediaKind.TABLE, [{"a": "x" * 5000, "b": 2**70, "c": [1, 2]}])
    assert found["rows"] == [["x" * 1024, str(2**70), "[1, 2]"]]
    found = value_of(MediaKind.TEXT, "é\ud800" * 50_000)
    assert (len(found["text"]), found["num_chars"]) == (64 << 10, 100_000)


BAD = {
    "no finite values": (MediaKind.HISTOGRAM, [math.nan]),
    "no values": (MediaKind.HISTOGRAM, []),
    "edges that fall": (MediaKind.HISTOGRAM, ([1], [2, 1])),
    "a missing edge": (MediaKind.HISTOGRAM, ([1, 2], [1, 2])),
    "negative counts": (MediaKind.HISTOGRAM, ([-1], [1, 2])),
    "five dimensions": (MediaKind.IMAGE, np.zeros((1, 1, 1, 1, 1))),
    "five channels": (MediaKind.IMAGE, np.zeros((9, 9, 5))),
    "no pixels": (MediaKind.IMAGE, np.zeros((0, 4))),
    "too many pixels": (MediaKind.IMAGE, np.zeros((5000, 5000), np.uint8)),
    "too wide": (MediaKind.IMAGE, np.zeros((1, 9000), np.uint8)),
    "noise": (MediaKind.IMAGE, np.random.default_rng(0).integers(0, 256, (1500, 1500))),
    "no file": (MediaKind.IMAGE, "missing.png"),
    "no picture": (MediaKind.IMAGE, b"<svg>"),
    "no samples": (MediaKind.AUDIO, ([], 8000)),
    "no rate": (MediaKind.AUDIO, ([1], 0)),
    "no sound": (MediaKind.AUDIO, b"RIFF"),
    "no columns": (MediaKind.TABLE, {}),
    "columns of different lengths": (MediaKind.TABLE, {"a": [1], "b": [1, 2]}),
    "33 columns": (MediaKind.TABLE, {str(n): [1] for n in range(33)}),
    "a huge table": (MediaKind.TABLE, {"a": ["x" * 1000] * 1000}),
    "too few predictions": (MediaKind.CONFUSION_MATRIX, ([1, 2], [1])),
    "no labels": (MediaKind.CONFUSION_MATRIX, ([], [])),
    "half a class": (MediaKind.CONFUSION_MATRIX, ([0.5], [1])),
    "a negative class": (MediaKind.CONFUSION_MATRIX, ([-1], [1])),
    "a class without a name": (MediaKind.CONFUSION_MATRIX, ([0], [1], ["a"])),
    "too many classes": (MediaKind.CONFUSION_MATRIX, ([0], [10**9])),
    "densities": (MediaKind.HISTOGRAM, np.histogram([1, 2, 4], density=True)),
    "a sparse tensor": (MediaKind.HISTOGRAM, torch.eye(3).to_sparse()),
    "an infinite rate": (MediaKind.AUDIO, ([0.0], math.inf)),
    "no square": (MediaKind.CONFUSION_MATRIX, [[1, 2]]),
    "labels that are no labels": (MediaKind.ROC_CURVE, ([2, 0], [0.1, 0.2])),
    "a missing score": (MediaKind.ROC_CURVE, ([1, 0], [0.1])),
    "only positive": (MediaKind.ROC_CURVE, ([1], [0.1])),
    "only negative": (MediaKind.PR_CURVE, ([0], [0.1])),
    "scores that are NaN": (MediaKind.PR_CURVE, ([1], [math.nan])),
    "no scores": (MediaKind.PR_CURVE, ([], [])),
}


@pytest.mark.parametrize("name", BAD)
def test_values_that_cannot_be_stored_are_named(name: str) -> None:
    kind, given = BAD[name]
    with pytest.raises(ValueError, match=r"."):
        convert(kind, given)


WRONG = {
    "a list of texts": (MediaKind.HISTOGRAM, ["a"]),
    "complex numbers": (MediaKind.IMAGE, np.zeros((2, 2), complex)),
    "no audio": (MediaKind.AUDIO, [1, 2]),
    "a number": (MediaKind.TEXT, 5),
    "a text": (MediaKind.TABLE, "a"),
    "rows that are lists": (MediaKind.TABLE, [[1]]),
    "one array": (MediaKind.ROC_CURVE, [1, 0]),
    "other names": (MediaKind.CONFUSION_MATRIX, {"matrix": [[1]]}),
}


@pytest.mark.parametrize("name", WRONG)
def test_objects_of_other_types_are_refused(name: str) -> None:
    kind, given = WRONG[name]
    with pytest.raises(TypeError, match=r"."):
        convert(kind, given)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.write(files.picture()[:-12])
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=f"at most {MAX_FILE_BYTES:,} are stored"):
        convert(MediaKind.IMAGE, path)


def test_floats_are_read_back_exactly() -> None:
    third = struct.unpack("<d", struct.pack("<d", 1 / 3))[0]
    assert value_of(MediaKind.TABLE, {"a": [third]})["rows"] == [[1 / 3]]
