"""Export of a trained model to a file that runs without dray: ONNX, or torch's ExportedProgram."""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ray_workers.training.core import compat_torch

ONNX, PROGRAM = ".onnx", ".pt2"
OUTPUT = "logits"
ABOUT = "about.json"
"""Name of the file in an ExportedProgram that describes the model. An ONNX file contains the
description in the metadata property `about`."""


def export(
    model: nn.Module,
    inputs: str,
    example: Tensor,
    path: str | os.PathLike[str],
    about: Mapping[str, Any],
) -> Path:
    """Write the model, for use on the CPU, to a file that ends in `.onnx` or `.pt2`, and return the
    file's path.

    `inputs` is the name of the model's only input. `example` is an example input (N, ...), in which
    N is dynamic and the other dimensions are fixed. `about` describes inputs and outputs, as JSON
    data. For a classification, the exported model returns a number for each class, from which
    `predict` derives its decision. For a regression, the exported model returns the predicted
    number. Raises ValueError for another suffix, and ImportError if the packages of `dray[onnx]`
    are missing.
    """
    target = Path(path)
    if target.suffix not in (ONNX, PROGRAM):
        raise ValueError(
            f"{target.name!r} must end in {ONNX} for ONNX, or in {PROGRAM} for torch.export"
        )
    if target.suffix == ONNX:
        need("export to ONNX", "onnx", "onnx", "onnxscript")
    on_cpu = copy.deepcopy(model).cpu().eval()
    with _without_advice():
        with torch.no_grad():
            program = torch.export.export(on_cpu, (example,), dynamic_shapes=({0: Dim("batch")},))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix == PROGRAM:
            torch.export.save(program, target, extra_files={ABOUT: json.dumps(about)})
        else:
            _write_onnx(program, inputs, target, about)
    return target


def need(purpose: str, extra: str, *packages: str) -> None:
    """Raise ImportError if one of these packages is missing. `extra` is the extra of dray that
    installs them."""
    for name in packages:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise ImportError(
                f"{purpose} requires the package {name}: pip install 'dray[{extra}]'", name=name
            ) from error


def _write_onnx(
    program: ExportedProgram, inputs: str, target: Path, about: Mapping[str, Any]
) -> None:
    converted = torch.onnx.export(
        program, input_names=[inputs], output_names=[OUTPUT], dynamo=True, verbose=False
    )
    assert converted is not None
    converted.model.metadata_props["about"] = json.dumps(about)
    converted.save(target)


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence torch's package recommendations, and warnings about deprecated calls in torch's own
    code."""
    logger = logging.getLogger(compat_torch.ONNX_REGISTRATION_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
