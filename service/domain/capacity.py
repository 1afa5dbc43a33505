"""When the storage counts as full: a pure rule, and its sentence."""

from __future__ import annotations

HINT = (
    "delete finished jobs (`dray delete`), or ask who runs the server for more room "
    "(DRAY_STORAGE_QUOTA_BYTES, DRAY_MIN_FREE_BYTES)"
)


def problem(
    *, used: int | None, free: int | None, quota: int | None, min_free: int | None
) -> str | None:
    """Why no job should be taken or started, or None while there is room. All in bytes.

    An amount that is not known (None) is no reason. Running jobs go on: they were promised room.
    """
    if quota is not None and used is not None and used >= quota:
        return f"the storage holds {size(used)} and its quota is {size(quota)}"
    if min_free is not None and free is not None and free < min_free:
        return f"the disk has {size(free)} free and {size(min_free)} must stay free"
    return None


def size(amount: int) -> str:
    value = float(amount)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"
