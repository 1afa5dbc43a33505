"""A user's own model, created by the job's code."""

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
    """Create the model on the CPU, with the same weights on every rank.

    The weights depend only on the constructor and the random generators of torch, NumPy and Python.
    `inputs` and `outputs` are the shapes for one sample, `form` describes the shape of the outputs
    in words, and `dtype` is the type of the inputs. If the object is not a model or does not fit
    the data, ModelError is raised, either by this function or when the model is called.
    """
    own = derive_seed("model", seed)
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    model = created(options)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(f"{options.target} has no trainable parameters")
    model.register_forward_hook(partial(_check_outputs, options.target, tuple(outputs), form))
    _try_out(model, options.target, torch.zeros(PROBE_SAMPLES, *inputs, dtype=dtype))
    return model


def created(options: spec.Imported) -> nn.Module:
    """Create the object with the current state of the random generators. Raises ModelError."""
    try:
        return _made(options)
    except ModuleNotFoundError as error:
        is_its_own = f"{options.module}.".startswith(f"{error.name}.")
        if not is_its_own or options.code is not None:
            raise
        raise ModelError(
            f"there is no module {error.name} on this node, and the job has no code: add "
            "model.code, for example with `dray submit --code FOLDER`"
        ) from error


def at_hand(options: spec.Imported) -> nn.Module:
    """Create the model, so that weights can be loaded into it. Raises ImportError if the model's
    code is missing."""
    try:
        return _made(options)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the model is {options.target}, but there is no module {error.name!r}: download "
            "the job's code with `dray code JOB FOLDER`, and add FOLDER to PYTHONPATH",
            name=error.name,
        ) from error


def _made(options: spec.Imported) -> nn.Module:
    if _is_of_python(options.module):
        raise ModelError(f"{options.module} is in Python's standard library, which has no models")
    module = importlib.import_module(options.module)
    make = getattr(module, options.attribute, None)
    if make is None:
        raise ModelError(f"there is no {options.attribute} in the module {options.module}")
    try:
        model = make(**options.args)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{options.target} can't be created with model.args {options.args}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{options.target} returned {_shown(model)}, not a torch.nn.Module")
    return model


def _is_of_python(name: str) -> bool:
    """Whether a module is part of Python's standard library, rather than a user's file with the
    same name."""
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names:
        return False
    found = importlib.util.find_spec(top)
    origin = Path((found and found.origin) or "")
    return not origin.is_file() or origin.is_relative_to(sysconfig.get_path("stdlib"))


def _try_out(model: nn.Module, target: str, zeros: Tensor) -> None:
    """Check that the model, in evaluation mode, can compute outputs for a batch of zeros."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(zeros)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{target} can't process a batch of shape {tuple(zeros.shape)} and type "
            f"{zeros.dtype}, as in the data: {type(error).__name__}: {error}"
        ) from error
    finally:
        model.train(was_training)


def _check_outputs(
    target: str, outputs: tuple[int, ...], form: str, _: nn.Module, inputs: Any, found: object
) -> None:
    """Check the outputs of a forward pass. Each pass is checked, because a model can return
    different shapes in training."""
    expected = (len(inputs[0]), *outputs)
    if not isinstance(found, Tensor):
        raise ModelError(f"{target} returns {_shown(found)}, not a tensor of shape {form}")
    if tuple(found.shape) != expected:
        raise ModelError(
            f"{target} returns a tensor of shape {tuple(found.shape)} for inputs of shape "
            f"{tuple(inputs[0].shape)}: expected {expected}, which is {form}"
        )
    if not found.is_floating_point():
        raise ModelError(
            f"{target} returns a tensor of {found.dtype}: expected a floating-point type such "
            "as torch.float32"
        )


def _shown(value: object) -> str:
    return f"a {type(value).__name__}"
