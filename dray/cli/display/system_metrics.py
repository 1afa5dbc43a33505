"""Tables of a job's system metrics: the current resource use of each rank and node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dray.cli.display.output import number, size

if TYPE_CHECKING:
    from dray.views import Metrics, RankSample, SystemMetrics, SystemSample

_Column = tuple[str, Callable[[float], str]]
"""Heading, and the function that formats a value."""


def _rate(num_bytes: float) -> str:
    return f"{size(int(num_bytes))}/s"


def _size(num_bytes: float) -> str:
    return size(int(num_bytes))


def _share(share: float) -> str:
    return f"{share:.0%}"


_RANK: dict[str, _Column] = {
    "system/cpu": ("CPU", number),
    "system/memory_rss": ("MEMORY", _size),
    "system/disk_read": ("READ", _rate),
    "system/disk_written": ("WRITTEN", _rate),
}
_GPU: dict[str, _Column] = {
    "utilization": ("GPU", _share),
    "memory_used": ("GPU MEMORY", _size),
    "power_w": ("WATTS", number),
    "temperature_c": ("CELSIUS", number),
}
_NODE: dict[str, _Column] = {
    "system/node/cpu": ("CPU", number),
    "system/node/memory_used": ("MEMORY", _size),
    "system/node/memory_available": ("AVAILABLE", _size),
    "system/node/disk_read": ("READ", _rate),
    "system/node/disk_written": ("WRITTEN", _rate),
    "system/node/network_received": ("RECEIVED", _rate),
    "system/node/network_sent": ("SENT", _rate),
}


def tabulate(sample: SystemSample, rank: int | None, names: Sequence[str]) -> None:
    """Write the resource use of every rank (or of `rank` only) with a line for each GPU, and the
    resource use of the nodes. Each node is identified by its lowest rank. `names` are the names of
    the ranks, if they have roles."""
    from dray.cli.display.output import write
    from dray.cli.display.tables import table
    from dray.ranks import with_role

    shown = [one for one in sample.ranks if rank is None or one.rank == rank]
    if not shown:
        write("no samples yet")
        return
    headings = ("RANK", *(heading for heading, _ in (*_RANK.values(), *_GPU.values())))
    rows = [
        _line(one, with_role(one.rank, names), gpu)
        for one in shown
        for gpu in range(_num_gpus(one.values))
    ]
    table(headings, rows, optional=tuple(reversed(headings[3:])))
    nodes = [one for one in shown if _NODE.keys() & one.values.keys()]
    if nodes:
        write("")
        headings = ("NODE OF RANK", *(heading for heading, _ in _NODE.values()))
        table(
            headings,
            [(with_role(one.rank, names), *_cells(one.values, _NODE)) for one in nodes],
            optional=tuple(reversed(headings[3:])),
        )


def _num_gpus(values: Mapping[str, float]) -> int:
    """Return the number of lines for a rank: one per GPU, and at least one."""
    numbers = [int(key.split("/")[2]) for key in values if key.startswith("system/gpu/")]
    return max(numbers, default=0) + 1


def _line(one: RankSample, name: str, gpu: int) -> tuple[object, ...]:
    """Return the line for one of the rank's GPUs. The line of the first GPU also contains the
    values of the rank."""
    of_gpu = {f"system/gpu/{gpu}/{what}": column for what, column in _GPU.items()}
    of_rank = (name, *_cells(one.values, _RANK)) if gpu == 0 else ("", *[None] * len(_RANK))
    return (*of_rank, *_cells(one.values, of_gpu))


def _cells(values: Mapping[str, float], columns: Mapping[str, _Column]) -> list[str | None]:
    return [form(values[key]) if key in values else None for key, (_, form) in columns.items()]


def by_seconds(answer: SystemMetrics) -> Metrics:
    """Replace the steps of the series with the seconds since the first point, for charts."""
    from dray.views import Metrics, Series

    first = min((one.times[0] for one in answer.series.values() if one.times), default=0)
    series = {
        key: Series(steps=[time - first for time in one.times], values=[*one.values])
        for key, one in answer.series.items()
    }
    return Metrics(series=series, next_step=0)
