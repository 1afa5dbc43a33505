"""The part of a GPU's memory that a process may take which shares the GPU with other jobs.

torch's allocator refuses more of it, as an error of that process alone. A program that allocates
by other means is told its part, and nobody holds it to that.
"""

from __future__ import annotations

from collections.abc import Mapping

FRACTION = "DRAY_GPU_MEMORY_FRACTION"
"""Variable of a rank that has a part of a GPU."""
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""torch reads the first of these that is set, when it begins with the GPU."""
_KNOWN_SINCE = (2, 10)
"""A torch that does not know the option ends at it."""


def told(share: float) -> dict[str, str]:
    """Variables that tell the program its part. XLA, which JAX uses, goes by the second."""
    return {FRACTION: f"{share:g}", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:g}"}


def for_torch(version: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The variable that has torch of this version keep to the part in `environ`; nothing for a
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
