"""Jobs that start with the weights of another job's checkpoint, according to their documents."""

from __future__ import annotations

from typing import Any

import pytest

from service.domain.init_from.weights import difference
from tests.unit.service.helpers import spec

DIGITS = {"data": {"source": "sklearn://digits"}}
FOLDER = {"data": {"source": "file:///images"}}
IRIS = {"recipe": "tabular_classification", "data": {"source": "sklearn://iris"}}
TEXT = {"recipe": "language_model", "data": {"source": "file:///t.txt"}}


def images(height: int, width: int, **model: Any) -> dict[str, Any]:
    return {"data": {"source": "file:///images", "image_size": [height, width]}, "model": model}


def csv(*features: str, recipe: str = "tabular_classification") -> dict[str, Any]:
    data = {"source": "file:///t.csv", "target": "y", "features": list(features) or None}
    return {"recipe": recipe, "data": data}


def masks(num_classes: int | None, **model: Any) -> dict[str, Any]:
    classes = [f"c{n}" for n in range(num_classes)] if num_classes else None
    data = {"source": "file:///masks", "classes": classes}
    return {"recipe": "image_segmentation", "data": data, "model": {"name": "unet", **model}}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (DIGITS, {**DIGITS, "train": {"seed": 1, "epochs": 9}, "resources": {"num_workers": 2}}),
        (DIGITS, {"model": {"name": "cnn", "dropout": 0.5}}),
        (DIGITS, FOLDER),
        (images(33, 30, name="cnn"), images(34, 31, name="cnn")),
        (images(8, 8, name="resnet"), images(64, 32, name="resnet")),
        (csv("a", "b"), csv()),
        (IRIS, csv("a", "b", "c", "d")),
        (masks(3), masks(None)),
        ({**TEXT, "model": {"context_length": 64}}, {**TEXT, "model": {"dropout": 0.1}}),
        (
            {**TEXT, "model": {"tokenizer": "s3://b/t.json"}},
            {**TEXT, "model": {"tokenizer": "file:///t.json"}},
        ),
    ],
)
def test_what_the_shapes_do_not_hang_on_may_differ(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert difference(spec(**before), spec(**after)) is None
    assert difference(spec(**after), spec(**before)) is None


@pytest.mark.parametrize(
    ("before", "after", "pointer", "says"),
    [
        (DIGITS, IRIS, "/recipe", "is tabular_classification, but was image_classification"),
        (DIGITS, {"model": {"name": "mlp"}}, "/model/name", "is mlp, but was cnn"),
        (DIGITS, {"model": {"name": "cnn", "width": 64}}, "/model/width", "is 64, but was 32"),
        (masks(2, depth=3), masks(2), "/model/depth", "is 4, but was 3"),
        (TEXT, {**TEXT, "model": {"num_layers": 9}}, "/model/num_layers", "is 9, but was 4"),
        (TEXT, {**TEXT, "model": {"num_heads": 2}}, "/model/num_heads", "is 2, but was 4"),
        (
            TEXT,
            {**TEXT, "model": {"tokenizer": "s3://b/t.json"}},
            "/model/tokenizer",
            "is a tokenizer, but was unset",
        ),
        (IRIS, csv("a", "b"), "/data/features", "is 2 columns, but was 4 columns"),
        (
            IRIS,
            {**IRIS, "data": {"source": "sklearn://wine"}},
            "/data/source",
            "is 13 columns, but was 4 columns",
        ),
        (
            {"model": {"name": "cnn"}},
            images(12, 8, name="cnn"),
            "/data/image_size",
            "is 12 x 8 pixels, but was 8 x 8 pixels",
        ),
        (images(9, 8, name="mlp"), images(8, 8, name="mlp"), "/data/image_size", "was 9 x 8"),
        (masks(2), masks(3), "/data/classes", "is 3 classes, but was 2 classes"),
        ({**DIGITS, "recipe": "tabular_classification"}, IRIS, "/data/source", "was 64 columns"),
        (
            {"recipe": None, "script": {"entrypoint": "train.py"}},
            DIGITS,
            "/init_from/job",
            "is a job that ran a script",
        ),
    ],
)
def test_weights_of_another_shape_are_told_by_the_field_and_both_values(
    before: dict[str, Any], after: dict[str, Any], pointer: str, says: str
) -> None:
    found = difference(spec(**before), spec(**after))
    assert found is not None
    assert found.pointer == pointer
    assert says in found.why
