"""Recognises errors after which a process can't use its GPU any longer, so that the process must be
replaced. Does not import torch, because the rank of a script may have a different version of torch.

The codes and texts come from the CUDA runtime, and HIP uses the same ones. `torch.AcceleratorError`
has the code as `error_code`; other errors, such as NCCL's, contain only the text.
"""

from __future__ import annotations

import re

from ray_workers.training.core.error_chain import chain_of

ASSERT = 710
"""A failed assertion in a kernel (`cudaErrorAssert`), such as an index that is out of bounds."""
_TEXTS = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    226: "invalid access of peer GPU memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    ASSERT: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
}
"""The errors after which all further operations of the process fail, with their texts."""
_IN_MESSAGE = re.compile(
    rf"(?:CUDA error: |HIP error: |Cuda failure (?:\d+ )?')({'|'.join(_TEXTS.values())})",
    re.IGNORECASE,
)
"""The form with an apostrophe is NCCL's."""
_PREFIXES = ("CUDA error", "HIP error")


class DeviceLostError(Exception):
    """The process can't use its GPU any longer."""

    def __init__(self, fault: BaseException) -> None:
        line = str(fault).strip().partition("\n")[0]
        super().__init__(f"a process can't use its GPU after this error: {line}")


def has_fault(error: BaseException) -> bool:
    """Whether the process can't use its GPU after this error."""
    return any(_code(each) is not None for each in chain_of(error))


def _code(error: BaseException) -> int | None:
    """Return the code of an error after which the process can't use its GPU; None for other
    errors."""
    code, text = getattr(error, "error_code", None), str(error)
    if isinstance(code, int) and text.startswith(_PREFIXES):
        return code if code in _TEXTS else None
    found = _IN_MESSAGE.search(text) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    words = found[1].lower()
    return next(code for code, known in _TEXTS.items() if known.lower() == words)


def as_lost(error: BaseException, *, has_undefined_results: bool = False) -> BaseException:
    """Return a DeviceLostError if the process must be replaced because of this error; otherwise,
    the error itself.

    A failed assertion is an error of the program, which would fail again. This does not apply if
    the assertion's operands might be the results of an aborted operation. has_undefined_results:
    whether the operands might be such results.
    """
    for each in chain_of(error):
        code = _code(each)
        if code is not None and (code != ASSERT or has_undefined_results):
            lost = DeviceLostError(each)
            lost.__cause__ = error
            return lost
    return error
