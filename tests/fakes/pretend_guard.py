"""The device guard of the pretended GPU, which calls Python where the guard of a real GPU does not.

If a hook raises an error in a backward pass, autograd's thread restores the previous stream while
the error is set. torch's guard for devices in Python then calls `type_`, Python rejects the result
of a function that returns while an error is set, and the process aborts, because restoring a stream
must not raise. Therefore `type_` keeps the error, and `torch.autograd` raises it.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_TYPE = torch._C._autograd.DeviceType.PrivateUse1
_fetched = [ctypes.c_void_p() for _ in range(3)]
"""The type, the value and the traceback of an error."""
_targets = [ctypes.byref(each) for each in _fetched]
_fetch, _normalise = ctypes.pythonapi.PyErr_Fetch, ctypes.pythonapi.PyErr_NormalizeException
_kept: list[BaseException] = []


class Guard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        _fetch(*_targets)  # must be the first call, because all others fail if an error is set
        if _fetched[0]:
            _normalise(*_targets)
            _kept.append(ctypes.cast(_fetched[1], ctypes.py_object).value)
        return _TYPE


def raise_kept_errors() -> None:
    """Make backward passes raise the errors that were kept."""
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def run_and_raise(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except SystemError:  # "returned NULL without setting an exception"
            if not _kept:
                raise
            raise _kept.pop() from None

    torch.autograd._engine_run_backward = run_and_raise  # type: ignore[attr-defined]
