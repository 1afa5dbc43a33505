"""How far the planner's memory is from what torch's memory tracker counts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.planner.work import jobs
from benchmarks.report import Result, Table
from benchmarks.torchrun import torchrun
from dray.spec import JobSpec
from service.planning.model.memory import memory_of
from service.planning.model.shapes import shapes_of

TIMEOUT_S = 300.0
GOAL = 0.15
METHOD = [
    "The jobs in `benchmarks/planner/work.py` run on CPU over gloo: three optimizer steps of "
    "dray's own loop under torchrun, on every rank inside torch's `MemTracker`.",
    "The measured memory is the peak size of tensors in the second and third step, on the rank "
    "with the highest peak, excluding the samples of the data set. The planned memory is the "
    f"planner's total. Goal: within {GOAL:.0%}.",
]


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """One run of each is enough: it is not a time. `num_rounds` is not used."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as home:
        for number, (name, (num_ranks, document)) in enumerate(jobs(Path(home)).items()):
            spec = JobSpec.model_validate(document)
            folder = Path(home) / str(number)
            folder.mkdir()
            (folder / "job.json").write_text(spec.model_dump_json())
            torchrun(
                "benchmarks.planner.rank", [str(folder)], num_ranks=num_ranks, timeout_s=TIMEOUT_S
            )
            found = max(json.loads(path.read_text()) for path in folder.glob("rank-*.json"))
            planned = memory_of(spec, shapes_of(spec)).total
            gap = planned / found - 1
            met = "yes" if abs(gap) <= GOAL else "no"
            rows.append([name, str(num_ranks), _mib(planned), _mib(found), f"{gap:+.1%}", met])
            progress(" | ".join(rows[-1]))
    return Result(
        name="planner",
        title="The planner's memory beside the measured peak",
        method=METHOD,
        rows=[],
        comparisons=[],
        tables=[
            Table(
                "Peak of the rank that holds the most",
                ["job", "ranks", "planned, MiB", "measured, MiB", "difference", "goal met"],
                rows,
            )
        ],
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"
