"""Errors after which a process can't use its GPU are told apart from the errors of a program."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ray_workers.shared.contracts import Cause
from ray_workers.training.core.device_faults import DeviceLostError, as_lost, has_fault
from ray_workers.training.core.errors import cause_of


def accelerator_error(code: int, text: str) -> Exception:
    error = torch.AcceleratorError(f"CUDA error: {text}\nCompile with `TORCH_USE_CUDA_DSA`")
    error.error_code = code  # type: ignore[attr-defined]
    return error


def raised_from(cause: Exception) -> Exception:
    error = ValueError("could not compute the loss")
    error.__cause__ = cause
    return error


NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error, NCCL version 2.27.5\n"
LOST = [
    accelerator_error(700, "an illegal memory access was encountered"),
    accelerator_error(719, "unspecified launch failure"),
    accelerator_error(214, "uncorrectable ECC error encountered"),
    accelerator_error(226, "a text that another version of CUDA has"),
    raised_from(accelerator_error(716, "misaligned address")),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("HIP error: unspecified launch failure"),
    dist.DistBackendError(NCCL + "Cuda failure 700 'an illegal memory access was encountered'"),
    dist.DistBackendError(NCCL + "Cuda failure 'unspecified launch failure'"),
]
ASSERTS = [
    accelerator_error(710, "device-side assert triggered"),
    RuntimeError("CUDA error: device-side assert triggered"),
]
OTHERS = [
    ValueError("CUDA error: an illegal memory access was encountered"),
    accelerator_error(209, "no kernel image is available for execution on the device"),
    accelerator_error(2, "out of memory"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    torch.AcceleratorError("probability tensor contains either inf, nan or element < 0"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_process_with_a_broken_context_is_lost(error: Exception) -> None:
    assert has_fault(error)
    lost = as_lost(error)
    assert isinstance(lost, DeviceLostError)
    assert cause_of(lost) is Cause.WORKER_LOST
    assert "\n" not in str(lost)


@pytest.mark.parametrize("error", ASSERTS, ids=str)
def test_a_failed_assertion_is_the_programs_error_unless_its_values_are_undefined(
    error: Exception,
) -> None:
    assert has_fault(error)
    assert as_lost(error) is error
    assert cause_of(error) is Cause.USER_ERROR
    assert isinstance(as_lost(error, has_undefined_results=True), DeviceLostError)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_unchanged(error: Exception) -> None:
    assert not has_fault(error)
    assert as_lost(error, has_undefined_results=True) is error
