"""Calls `forest` in a separate process, because training a forest would delay all other requests,
and importing scikit-learn would keep 100 MB of memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.domain.errors import Unavailable

LIMIT_S = 60.0
CODE_ROOT = Path(__file__).resolve().parents[3]
KEPT = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LANG", "HOME", "TMPDIR")
"""Variables of the service's environment that the process gets."""


async def ask(question: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer of `forest.answer`. Raises Unavailable if the process fails or takes longer
    than `LIMIT_S` seconds."""
    code_path = [str(CODE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    # One thread: the trees are small, and the other cores are for other requests.
    environment |= {"PYTHONPATH": os.pathsep.join(code_path), "OMP_NUM_THREADS": "1"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "service.tracking.importance.forest"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output, errors = await process.communicate(json.dumps(question).encode())
    except TimeoutError:
        raise Unavailable(
            f"the importances were not computed within {LIMIT_S:g} s", hint="try again later"
        ) from None
    finally:
        if process.returncode is None:  # too slow, or the caller has disconnected
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            await process.wait()
    if process.returncode != 0:
        last = errors.decode(errors="replace").strip().rpartition("\n")[2]
        raise Unavailable(
            f"the process that computes importances failed: {last or process.returncode}",
            hint="the machines of the service need scikit-learn, which `.[server]` installs",
        )
    found: dict[str, Any] = json.loads(output)
    return found
