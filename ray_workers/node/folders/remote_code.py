"""Code that a node fetches itself: a commit of a git repository, or an archive at a web address.

It is fetched in a process of its own, which takes what a hostile server does to its time and memory
along when it ends. The process reads a RemoteCodeRef from its input and prints its answer, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from ray_workers.node.folders import git_commit
from ray_workers.node.folders.git_commit import CodeRefused, CodeUnreachable, GitCommit
from ray_workers.node.forkserver.manager import CODE_ROOT
from ray_workers.shared.node_needs import DataPolicy, RemoteCodeRef

LIMIT_S = 300.0
"""How long a node may take to fetch code."""
BLOCK_BYTES = 4096
START_S = 60.0
"""How much longer the process may live: it has to start, and to give its answer."""


def fetch_apart(code: RemoteCodeRef, target: Path, scratch: Path, limit_s: float = LIMIT_S) -> int:
    """`fetch`, in another process."""
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
            answer, _ = process.communicate(asked, timeout=limit_s + START_S)
        except subprocess.TimeoutExpired:
            raise CodeUnreachable(f"it was not fetched within {limit_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        raise CodeUnreachable(f"the process that fetches it ended with code {process.returncode}")
    kind, told = json.loads(answer)
    if kind == "refused":
        raise CodeRefused(told)
    if kind == "unreachable":
        raise CodeUnreachable(told)
    return int(told)


def fetch(code: RemoteCodeRef, target: Path, scratch: Path, limit_s: float) -> int:
    """Write the files into a folder; the size that they take on a disk, in bytes. CodeRefused for
    code that can't be had or may not be used; CodeUnreachable, or OSError, where another try may
    help.

    scratch: a folder to work in, which is not removed.
    """
    if code.git is not None and code.credentials is None:
        paths = git_commit.fetch(GitCommit.of(code, {}, limit_s), target, scratch)
    else:
        from ray_workers.node.folders import code_sources

        paths = code_sources.fetch(code, target, scratch, limit_s)
    sizes = ((target / path).stat().st_size for path in paths)
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes)


def main() -> None:
    """The other process."""
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
