"""A model of the user's own, made from the code of the job."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.training.core.errors import ModelError
from ray_workers.training.data.sampler import derive_seed

PROBE_SAMPLES = 2


def build(
    options: spec.Imported, seed: int, inputs: Sequence[int], outputs: Sequence[int], form: str
) -> nn.Module:
    """The model on the CPU, with the same numbers on every rank.

    Its constructor and torch's, NumPy's and Python's generators are all that the numbers depend on.
    inputs, outputs: shapes of a sample. form: words for the shape of the outputs. ModelError for
    what is no model, or none for these data.
    """
    own = derive_seed("model", seed)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    model = _made(options)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{options.target} has no parameter to train")
    _check(model, options.target, inputs, outputs, form)
    return model


def at_hand(options: spec.Imported) -> nn.Module:
    """The model, for weights that are loaded into it. ImportError where its code is not there."""
    try:
        return _made(options)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the model is {options.target}, and there is no module {error.name!r} here: fetch the "
            "job's code by `dray code JOB FOLDER`, and put FOLDER on PYTHONPATH",
            name=error.name,
        ) from error


def _made(options: spec.Imported) -> nn.Module:
    if _is_of_python(options.module):
        raise ModelError(f"{options.module} is of Python's own library, which has no models")
    module = importlib.import_module(options.module)
    make = getattr(module, options.attribute, None)
    if make is None:
        raise ModelError(f"there is no {options.attribute} in the module {options.module}")
    model = make(**options.args)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{options.target} made {_said(model)}, and no torch.nn.Module")
    return model


def _is_of_python(name: str) -> bool:
    """Whether a module is one of Python's own, and no file of the user's that has its name."""
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return False
    found = importlib.util.find_spec(top)
    place = Path((found and found.origin) or "")
    return not place.is_file() or place.is_relative_to(sysconfig.get_path("stdlib"))


def _check(
    model: nn.Module, target: str, inputs: Sequence[int], outputs: Sequence[int], form: str
) -> None:
    """Compute the outputs of two samples of zeros, in evaluation mode."""
    expected = (PROBE_SAMPLES, *outputs)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = model(torch.zeros(PROBE_SAMPLES, *inputs))
    except Exception as error:
        raise ModelError(
            f"{target} can't compute a batch of shape {(PROBE_SAMPLES, *inputs)}, as the data have "
            f"it: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(was_training)
    if not isinstance(found, Tensor):
        raise ModelError(f"{target} returns {_said(found)}, and no tensor of shape {form}")
    if tuple(found.shape) != expected:
        raise ModelError(
            f"{target} returns a tensor of shape {tuple(found.shape)} for a batch of "
            f"{PROBE_SAMPLES}: expected {form}, here {expected}"
        )


def _said(value: object) -> str:
    return f"a {type(value).__name__}"
