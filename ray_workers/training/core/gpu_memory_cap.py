"""The share of a GPU's memory for a process that shares the GPU with other jobs.

torch's allocator refuses to allocate more, with an error in that process only. A program with
another allocator gets its share in a variable, and dray does not enforce it.
"""

from __future__ import annotations

from collections.abc import Mapping

FRACTION = "DRAY_GPU_MEMORY_FRACTION"
"""Variable of a rank that has a share of a GPU."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads the first of these that is set, when it initializes the GPU."""
_KNOWN_SINCE = (2, 10)
"""An older torch fails because it does not know the option."""


def variables(share: float) -> dict[str, str]:
    """Variables that inform the program of its share. XLA, which JAX uses, reads the second."""
    return {FRACTION: f"{share:g}", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:g}"}


def for_torch(version: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that makes this version of torch respect the share in `environ`; empty for a
    process that has its GPU alone, and for a torch that is too old."""
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
