"""Classifies errors of a user's program without importing torch, so that it also works on ranks
whose environment has a different version of torch, or no torch."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator


class EntrypointError(Exception):
    """The script does not exist at the path given by `script.entrypoint`."""


class NotPreparedError(Exception):
    """An elastic script ended without calling `train.prepare`."""


_REFUSALS = (ValueError, TypeError, RuntimeError)
_DETERMINISTIC = (EntrypointError, NotPreparedError, SyntaxError, ModuleNotFoundError)
NO_SUCH_NAME = "cannot import name"
_TEXTS_OF_PLAIN_IMPORTS = (NO_SUCH_NAME, "No module named")  # the second is from `runpy`

# Messages of errors that gloo, NCCL, and the store raise when a peer is gone. Gloo raises a plain
# RuntimeError, which can be recognised only by its message.
PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|connection .*closed by peer|socket closed"
    r"|broken pipe|remote process exited|timed out waiting|nccl communicator was aborted"
    r"|watchdog caught collective operation timeout"
    r"|application timeout caused pair closure",
    re.IGNORECASE,
)


def chain_of(error: BaseException, *, has_context: bool = True) -> Iterator[BaseException]:
    """Iterate over an error, the error from which it was raised, and so on. An exception group is
    followed by its first exception.

    has_context: whether to also follow the implicit context, which is the error that was being
    handled.
    """
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        if isinstance(following, BaseExceptionGroup):
            following = following.exceptions[0]
            continue
        is_hidden = following.__suppress_context__ or not has_context
        following = following.__cause__ or (None if is_hidden else following.__context__)


def is_deterministic(error: BaseException) -> bool:
    """Whether the same code fails with this error in every run."""
    is_missing = type(error) is ImportError and str(error).startswith(_TEXTS_OF_PLAIN_IMPORTS)
    return is_missing or isinstance(error, _DETERMINISTIC) or is_refusal(error)


def is_refusal(error: BaseException) -> bool:
    """Whether the error comes from a `raise` statement in `dray.train` that rejects an always
    invalid call, such as a second `init()`."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or type(error) not in _REFUSALS:
        return False
    frame = last.tb_frame
    module = str(frame.f_globals.get("__name__", ""))
    # If C code, such as torch, raises an error, the last frame belongs to the Python code that
    # called the C code. Therefore, check that the last frame executed a `raise` statement.
    raises = dis.opname[frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return raises and (module == "dray.train" or module.startswith("dray.train."))
