"""Errors of a user's program, as far as they can be told without torch: also a rank whose
environment has another torch, or none, judges by these."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator


class EntrypointError(Exception):
    """The script is not where `script.entrypoint` says."""


class NotPreparedError(Exception):
    """An elastic script ended without `train.prepare`."""


_REFUSALS = (ValueError, TypeError, RuntimeError)
_DETERMINISTIC = (EntrypointError, NotPreparedError, SyntaxError, ModuleNotFoundError)
NO_SUCH_NAME = "cannot import name"
_SAID_OF_PLAIN_IMPORTS = (NO_SUCH_NAME, "No module named")  # the second one by `runpy`

# The words of gloo, NCCL and the store when the other end is gone. Gloo raises a bare RuntimeError,
# so its words are all there is to go by.
PEER_IS_GONE = re.compile(
    r"connection (was )?(closed|reset|refused)|connection .*closed by peer|socket closed"
    r"|broken pipe|remote process exited|timed out waiting|nccl communicator was aborted"
    r"|watchdog caught collective operation timeout"
    r"|application timeout caused pair closure",
    re.IGNORECASE,
)


def chain_of(error: BaseException, *, has_context: bool = True) -> Iterator[BaseException]:
    """The error, the one that it was raised from, and so on to the first; of a group of errors the
    first one.

    has_context: also the error that was being handled when another was raised.
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
    """Whether the same code ends in this error whenever it runs."""
    is_missing = type(error) is ImportError and str(error).startswith(_SAID_OF_PLAIN_IMPORTS)
    return is_missing or isinstance(error, _DETERMINISTIC) or is_refusal(error)


def is_refusal(error: BaseException) -> bool:
    """Whether `dray.train` raised the error by a statement of its own, because of a call that can't
    be right, such as a second `init()`."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or type(error) not in _REFUSALS:
        return False
    frame = last.tb_frame
    module = str(frame.f_globals.get("__name__", ""))
    # An error that a function of C raised in there, such as one of torch, is none.
    raises = dis.opname[frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    return raises and (module == "dray.train" or module.startswith("dray.train."))
