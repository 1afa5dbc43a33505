"""Fetches code to a node: a commit of a Git repository, or an archive at a URL.

A separate process fetches the code, so that a hostile server can waste only the time and memory of
that process. The process reads a RemoteCodeRef from its input and prints its response, both as
JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from ray_workers.node.folders import git_commit
from ray_workers.node.folders.git_commit import CodeRefused, CodeUnreachable, GitCommit
from ray_workers.node.forkserver.manager import CODE_ROOT
from ray_workers.node.shared_work import Abandoned
from ray_workers.shared.node_needs import DataPolicy, RemoteCodeRef

LIMIT_S = 300.0
"""Time limit in seconds for fetching code."""
BLOCK_BYTES = 4096
ASK_AGAIN_S = 0.5
"""Seconds between two checks of whether a job still needs the code."""
END_S = 5.0
"""Seconds that the process is given to end its child processes."""
START_S = 60.0
"""Additional seconds for the process to start and to print its response."""


def fetch_apart(
    code: RemoteCodeRef,
    target: Path,
    scratch: Path,
    is_wanted: Callable[[], bool] = lambda: True,
    limit_s: float = LIMIT_S,
) -> int:
    """Call `fetch` in another process. Ends the process and raises Abandoned when no job still
    needs the code."""
    asked = json.dumps([asdict(code), str(target), str(scratch), limit_s])
    path = [str(CODE_ROOT), os.environ.get("PYTHONPATH")]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "ray_workers.node.folders.remote_code"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))},
        start_new_session=True,
    ) as process:
        try:
            answer = _answer_of(process, asked, limit_s, is_wanted)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise CodeUnreachable(
            f"the process that fetches the code exited with code {process.returncode}"
        )
    kind, result = json.loads(answer)
    if kind == "refused":
        raise CodeRefused(result)
    if kind == "unreachable":
        raise CodeUnreachable(result)
    return int(result)


def _answer_of(
    process: subprocess.Popen[str], asked: str, limit_s: float, is_wanted: Callable[[], bool]
) -> str:
    deadline = time.monotonic() + limit_s + START_S
    given: str | None = asked
    while is_wanted():
        try:
            return process.communicate(given, timeout=ASK_AGAIN_S)[0]
        except subprocess.TimeoutExpired:
            given = None  # it has been sent, or is being sent
            if time.monotonic() > deadline:
                raise CodeUnreachable(
                    f"the code could not be fetched within {limit_s:g} s"
                ) from None
    process.terminate()  # the process ends git, which is in a separate session
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    raise Abandoned


def fetch(code: RemoteCodeRef, target: Path, scratch: Path, limit_s: float) -> int:
    """Write the files to a folder, and return their size on disk in bytes. Raises CodeRefused if
    the code can't be fetched or isn't allowed, and CodeUnreachable or OSError if trying again may
    help.

    scratch: a folder for temporary files, which is not removed.
    """
    if code.git is not None and code.credentials is None:
        paths = git_commit.fetch(GitCommit.of(code, {}, limit_s), target, scratch)
    else:
        from ray_workers.node.folders import code_sources

        paths = code_sources.fetch(code, target, scratch, limit_s)
    sizes = ((target / path).stat().st_size for path in paths)
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


def main() -> None:
    """Run `fetch` in the separate process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    fields, target, scratch, limit_s = json.load(sys.stdin)
    code = RemoteCodeRef(**{**fields, "policy": DataPolicy(**fields["policy"])})
    try:
        size = fetch(code, Path(target), Path(scratch), limit_s)
        answer: tuple[str, str | int] = ("size", size)
    except CodeRefused as error:
        answer = ("refused", str(error))
    except (CodeUnreachable, OSError) as error:
        answer = ("unreachable", str(error))
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
