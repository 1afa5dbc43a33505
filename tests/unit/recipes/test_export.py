"""An exported model computes the numbers that `predict` uses, for any number of samples."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import Tensor

from dray.spec import JobSpec
from ray_workers import recipes
from ray_workers.recipes.export import ABOUT
from ray_workers.shared.node_needs import DataPolicy
from ray_workers.training.parallel.meta_init import materialise
from tests.marks import SOAK, soak

SAMPLES = 7
UNET = {"width": 4, "depth": 2}
GPT = {"width": 32, "num_layers": 2, "num_heads": 2, "context_length": 16}


def digits(folder: Path) -> dict[str, Any]:
    return {"recipe": "image_classification", "model": {"name": "resnet", "depth": 8}}


def masks(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    for kind, most in (("images", 256), ("masks", 3)):
        (folder / kind).mkdir()
        for number in range(6):
            pixels = rng.integers(0, most, (16, 16)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / kind / f"{number}.png")
    return {
        "recipe": "image_segmentation",
        "data": {"source": folder.as_uri(), "format": "images"},
        "model": UNET,
    }


def table(folder: Path) -> dict[str, Any]:
    """Numbers, dates and categories, all of which may be missing."""
    rows = "".join(
        f"{at % 7 or ''},2026-01-{at % 28 + 1:02},{('', 'red', 'blue')[at % 3]},{'ab'[at % 2]}\n"
        for at in range(60)
    )
    (folder / "table.csv").write_text(f"x,when,colour,y\n{rows}")
    data = {"source": (folder / "table.csv").as_uri(), "target": "y", "missing": "indicator"}
    return {"recipe": "tabular_classification", "data": data}


def number(folder: Path) -> dict[str, Any]:
    return {"recipe": "tabular_regression", "data": {"source": "sklearn://diabetes"}}


def text(folder: Path) -> dict[str, Any]:
    (folder / "text.txt").write_text("All that glitters is not gold. " * 40)
    source = (folder / "text.txt").as_uri()
    return {"recipe": "language_model", "data": {"source": source}, "model": GPT}


KINDS = pytest.mark.parametrize(
    ("documented", "name"),
    [
        (digits, "images"),
        soak(masks, "images"),
        soak(table, "rows"),
        soak(number, "rows"),
        soak(text, "tokens"),
    ],
)


def trained(document: dict[str, Any], folder: Path) -> tuple[Any, Tensor]:
    """(a loaded model, samples for it)."""
    spec = JobSpec.model_validate(document)
    work = recipes.RECIPES[document["recipe"]].build(spec, DataPolicy.open())
    materialise(work.model, torch.device("cpu"), 0)
    folder.mkdir()
    work.write_results(work.model, {}, 1, folder)
    at = torch.arange(SAMPLES) % len(work.train)
    return recipes.load(folder), work.train.take(at)[0]


@KINDS
def test_onnx_computes_what_the_model_computes(
    documented: Callable[[Path], dict[str, Any]], name: str, tmp_path: Path
) -> None:
    model, samples = trained(documented(tmp_path), tmp_path / "result")
    path = model.export(tmp_path / "new" / "model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_inputs()] == [name]
    assert [one.name for one in session.get_outputs()] == ["logits"]
    for count in (1, SAMPLES):
        (outputs,) = session.run(None, {name: samples[:count].numpy()})
        expected = model.model(samples[:count]).detach().numpy()
        np.testing.assert_allclose(outputs, expected, atol=1e-5, rtol=1e-5)


@SOAK
@KINDS
def test_a_program_of_torch_computes_what_the_model_computes(
    documented: Callable[[Path], dict[str, Any]], name: str, tmp_path: Path
) -> None:
    model, samples = trained(documented(tmp_path), tmp_path / "result")
    program = torch.export.load(model.export(tmp_path / "model.pt2")).module()
    for count in (1, SAMPLES):
        # The exported model computes in float32 where that is enough for the table's numbers.
        expected = model.model(samples[:count])
        torch.testing.assert_close(program(samples[:count]), expected, check_dtype=False)


@SOAK
def test_a_file_lists_its_columns_and_labels(tmp_path: Path) -> None:
    model, _ = trained(table(tmp_path), tmp_path / "result")
    written = onnx.load(model.export(tmp_path / "model.onnx"))
    about = json.loads({one.key: one.value for one in written.metadata_props}["about"])
    assert about["labels"] == ["a", "b"]
    assert about["numeric"] == ["x"]
    assert about["dates"] == {"when": ["days", "year", "month", "day", "weekday", "hour"]}
    assert about["categories"] == {"colour": {"blue": 1, "red": 2}}
    extra = {ABOUT: ""}
    torch.export.load(model.export(tmp_path / "model.pt2"), extra_files=extra)
    assert json.loads(extra[ABOUT]) == about


@SOAK
def test_a_shorter_text_may_be_filled_up(tmp_path: Path) -> None:
    model, samples = trained(text(tmp_path), tmp_path / "result")
    session = onnxruntime.InferenceSession(model.export(tmp_path / "model.onnx"))
    samples[:, 5:] = 0
    (outputs,) = session.run(None, {"tokens": samples.numpy()})
    expected = model.model(samples[:, :5]).detach().numpy()
    np.testing.assert_allclose(outputs[:, :5], expected, atol=1e-5, rtol=1e-5)


def test_another_ending_is_refused_and_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model, _ = trained(number(tmp_path), tmp_path / "result")
    with pytest.raises(ValueError, match=r"'model.pt' must end in \.onnx for ONNX, or in \.pt2"):
        model.export(tmp_path / "model.pt")
    assert not (tmp_path / "model.pt").exists()


def test_an_error_names_what_onnx_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = trained(number(tmp_path), tmp_path / "result")
    monkeypatch.delitem(sys.modules, "onnxscript", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(
        ImportError, match=r"requires the package onnxscript: pip install 'dray\[onn"
    ):
        model.export(tmp_path / "model.onnx")


class Absent:
    """Acts as if onnxscript were not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "onnxscript":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
