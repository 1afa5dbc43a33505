"""Many jobs of one second on a few slots: how long the queue takes beyond the jobs themselves."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.figures import ratio_of_medians
from benchmarks.machine import BenchmarkError, wait_until_quiet
from benchmarks.processes import service
from benchmarks.report import Comparison, Result, Row, seconds
from dray import Client
from dray.views import JobArray, JobState

NUM_JOBS = 200
NUM_SLOTS = 8
JOB_S = 1.0
NET_S = NUM_JOBS * JOB_S / NUM_SLOTS
GOAL, GOAL_WORDS = 1.3, "at most 1.3"
SETTLE_S = 6.0
TIMEOUT_S = 600.0
PROGRAM = f"import time\ntime.sleep({JOB_S})\n"

METHOD = (
    f"An array of {NUM_JOBS} jobs is submitted to a running `python -m api` with an embedded Ray "
    f"with {NUM_SLOTS} slots. Each job is a script with one process that sleeps for {JOB_S:g} s, "
    "so that dray can use the cores.",
    "Seconds from just before the submission to the end of the last job, according to its "
    "`finished_at`.",
    f"Ratio: relative to the jobs' net time, {NUM_JOBS} times {JOB_S:g} s divided by {NUM_SLOTS} "
    "slots. A/A: odd rounds against even rounds. A round begins when the machine is quiet, and "
    "the first round is not counted.",
)


def measure(num_rounds: int, progress: Callable[[str], None]) -> Result:
    """One array a round, after one that is not counted."""
    taken: list[float] = []
    with tempfile.TemporaryDirectory(prefix="dray-bench-") as folder:
        home = Path(folder)
        for part in ("code", "dray"):
            (home / part).mkdir()
        program = home / "code" / "second.py"  # its whole folder is uploaded
        program.write_text(PROGRAM)
        with service(home / "dray", num_slots=NUM_SLOTS) as client:
            for number in range(num_rounds + 1):
                wait_until_quiet(at_least_s=SETTLE_S)
                took = drained_s(client, program)
                progress(f"round {number}/{num_rounds}  {NUM_JOBS} jobs: {seconds(took)}")
                if number:
                    taken.append(took)
    return conclude(taken)


def drained_s(client: Client, program: Path) -> float:
    """Submit the array and wait for it; how long it took."""
    document = {
        "name": "second",
        "script": {"entrypoint": str(program)},
        "array": {"size": NUM_JOBS},
        "max_retries": 0,
    }
    submitted = time.time()
    array_id = client.submit(document).array_id
    assert array_id is not None
    array = client.wait_array(array_id, timeout_s=TIMEOUT_S)
    _assert_all_succeeded(array)
    ends = [job.finished_at for job in client.jobs(array=array_id)]
    return max(end.timestamp() for end in ends if end is not None) - submitted


def _assert_all_succeeded(array: JobArray) -> None:
    if array.counts != {JobState.SUCCEEDED: NUM_JOBS}:
        raise BenchmarkError(f"not all jobs have succeeded: {array.state}")


def conclude(taken: list[float]) -> Result:
    """The figures that follow from the samples."""
    ratio = ratio_of_medians(taken, [NET_S] * len(taken))
    same = ratio_of_medians(taken[0::2], taken[1::2])
    label = f"{NUM_JOBS} jobs of {JOB_S:g} s on {NUM_SLOTS} slots"
    return Result(
        name="short_jobs",
        title="Many jobs of one second",
        method=METHOD,
        rows=[Row(label, taken)],
        comparisons=[
            Comparison(
                f"{label} / net time", len(taken), ratio, same, GOAL_WORDS, ratio.value <= GOAL
            )
        ],
    )
