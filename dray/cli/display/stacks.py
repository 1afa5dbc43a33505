"""Stacks of ranks in the format of `faulthandler`, innermost frame first, as people read them."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+) in (\S+)')
_RUNNER = re.compile(r"/ray_workers/training/[a-z]+/(script|fresh_main|rank_main)\.py$")
_RUNPY = re.compile(r"(^<frozen runpy>|/runpy\.py)$")
_NOT_THE_USERS = re.compile(
    r"^<|/(site|dist)-packages/|/lib(64)?/python3\.\d+/|/ray_workers/|/dray/train/"
)
_THREAD = re.compile(r"^(Current )?(Thread|thread|Stack) ?.*\(most recent call first\):$")


def of_the_program(stack: str) -> str:
    """The stack without the frames of dray by which the main thread came to the user's program."""
    lines = stack.splitlines()
    end = next((at for at, line in enumerate(lines) if at and _THREAD.match(line)), len(lines))
    cut = next((at for at in range(end) if _RUNNER.search(_path(lines[at]))), end)
    while cut and _RUNPY.search(_path(lines[cut - 1])):
        cut -= 1
    if not any(_path(line) for line in lines[:cut]):
        return stack  # it is in dray's own code
    remarks = [line for line in lines[cut:end] if not _path(line)]
    return "\n".join([*lines[:cut], *remarks, *lines[end:]])


def innermost_of_user(stack: str) -> str | None:
    """`train.py, line 7 in step`: the innermost frame of the main thread in the user's own code."""
    for number, line in enumerate(stack.splitlines()):
        if number and _THREAD.match(line):
            return None
        frame = _FRAME.match(line)
        if frame is not None and not _NOT_THE_USERS.search(frame[1]):
            return f"{frame[1]}, line {frame[2]} in {frame[3]}"
    return None


def _path(line: str) -> str:
    frame = _FRAME.match(line)
    return "" if frame is None else frame[1]
