"""Limits the GPU memory of a process that shares the GPU with other jobs.

If the process exceeds its share, torch's allocator raises an error in this process only. Programs
that use a different allocator can read their share from an environment variable, but dray does not
enforce this share.
"""

from __future__ import annotations

from collections.abc import Mapping

FRACTION = "DRAY_GPU_MEMORY_FRACTION"
"""Environment variable that is set for a rank that has a share of a GPU."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""When torch initializes the GPU, it reads the first of these variables that is set."""
_KNOWN_SINCE = (2, 10)
"""First version of torch that supports the share as an allocator option; older versions raise an
error."""


def variables(share: float) -> dict[str, str]:
    """Return the variables that contain the program's share of the GPU memory. XLA, which is used
    by JAX, reads the second variable."""
    return {FRACTION: f"{share:g}", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:g}"}


def for_torch(version: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that makes this version of torch respect the share that `environ`
    contains; empty if the process does not share its GPU, or if torch is too old."""
    if FRACTION not in environ or version is None or not _is_known_to(version):
        return {}
    name = next((name for name in _SETTINGS if name in environ), _SETTINGS[-1])
    option = f"per_process_memory_fraction:{environ[FRACTION]}"
    return {name: ",".join(filter(None, (environ.get(name), option)))}


def _is_known_to(version: str) -> bool:
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    if not (major.isdecimal() and minor.isdecimal()):
        return False
    return (int(major), int(minor)) >= _KNOWN_SINCE
