"""A user's own model, made from the code of the job."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
import sysconfig
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dray import spec
from ray_workers.training.core.errors import ModelError
from ray_workers.training.data.sampler import derive_seed

PROBE_SAMPLES = 2


def build(
    options: spec.Imported,
    seed: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    form: str,
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Make the model on the CPU, with the same numbers on every rank.

    The numbers depend only on its constructor and the generators of torch, NumPy and Python.
    inputs, outputs: shapes of a sample. form: the shape of the outputs in words. dtype: type of the
    inputs. Raises ModelError, here or at a call, if it is not a model or does not fit the data.
    """
    own = derive_seed("model", seed)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    try:
        model = _made(options)
    except ModuleNotFoundError as error:
        is_its_own = f"{options.module}.".startswith(f"{error.name}.")
        if not is_its_own or options.code is not None:
            raise
        raise ModelError(
            f"there is no module {error.name} on this node, and the job has no code: add "
            "model.code, as `dray submit --code FOLDER` does"
        ) from error
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{options.target} has no parameter to train")
    model.register_forward_hook(partial(_check_outputs, options.target, tuple(outputs), form))
    _try_out(model, options.target, torch.zeros(PROBE_SAMPLES, *inputs, dtype=dtype))
    return model


def at_hand(options: spec.Imported) -> nn.Module:
    """The model, for weights that are loaded into it. Raises ImportError if its code is missing."""
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
        raise ModelError(f"{options.module} is in Python's own library, which has no models")
    module = importlib.import_module(options.module)
    make = getattr(module, options.attribute, None)
    if make is None:
        raise ModelError(f"there is no {options.attribute} in the module {options.module}")
    try:
        model = make(**options.args)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{options.target} can't be made with model.args {options.args}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{options.target} made {_shown(model)}, not a torch.nn.Module")
    return model


def _is_of_python(name: str) -> bool:
    """Whether a module is one of Python's own, and not a user's file with the same name."""
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return False
    found = importlib.util.find_spec(top)
    place = Path((found and found.origin) or "")
    return not place.is_file() or place.is_relative_to(sysconfig.get_path("stdlib"))


def _try_out(model: nn.Module, target: str, zeros: Tensor) -> None:
    """Compute the outputs for samples of zeros, in evaluation mode, to check the model."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(zeros)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{target} can't compute a batch of shape {tuple(zeros.shape)} and {zeros.dtype}, like "
            f"the data: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(was_training)


def _check_outputs(
    target: str, outputs: tuple[int, ...], form: str, _: nn.Module, inputs: Any, found: object
) -> None:
    """Check each forward pass, since a model may return other shapes in training."""
    expected = (len(inputs[0]), *outputs)
    if not isinstance(found, Tensor):
        raise ModelError(f"{target} returns {_shown(found)}, not a tensor of shape {form}")
    if tuple(found.shape) != expected:
        raise ModelError(
            f"{target} returns a tensor of shape {tuple(found.shape)} for inputs of shape "
            f"{tuple(inputs[0].shape)}: expected {form}, here {expected}"
        )
    if not found.is_floating_point():
        raise ModelError(
            f"{target} returns a tensor of {found.dtype}: expected numbers with a fraction, such "
            "as torch.float32"
        )


def _shown(value: object) -> str:
    return f"a {type(value).__name__}"
