"""`python -m benchmarks`: run benchmarks, and print and store the results in benchmarks/results."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import machine, report

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument(
        "--rounds", type=int, default=10, help=("rounds for each contender (default: 10)")
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown or options.rounds < 2:
        parser.error(
            f"unknown benchmark: {', '.join(unknown)}"
            if unknown
            else ("--rounds must be at least 2")
        )
    # The SDK reads DRAY_* variables, but the defaults are to be measured.
    for name in [name for name in os.environ if name.startswith(("DRAY_", "RAY_"))]:
        del os.environ[name]
    for name in options.names or _possible():
        taken_at = datetime.now(UTC).isoformat(timespec="seconds")
        measuring = importlib.import_module(f"benchmarks.{BENCHMARKS[name]}")
        result = measuring.measure(options.rounds, _tell)
        print(report.write(result, machine.describe(), taken_at, options.out), flush=True)
    return 0


def _possible() -> list[str]:
    """Return the benchmarks that can run on this machine. Reports the others, with what they
    require."""
    import torch

    from benchmarks.browsing.browser import lacks_browser
    from benchmarks.scheduler.measure import DATA, data_folder

    left_out = set()
    if not torch.cuda.is_available():
        _tell("skipping gpu: there is no GPU")
        left_out.add("gpu")
    if data_folder() is None:
        _tell(f"skipping replays: {DATA} is not set to a folder with traces")
        left_out |= {"scheduler", "scheduler_elastic"}
    if lacks_browser():
        in_browser = {"first_paint", "open_pages", "table_speed", "zoom_frames"}
        _tell(f"skipping {', '.join(sorted(in_browser))}: chromium or playwright is not installed")
        left_out |= in_browser
    return [name for name in BENCHMARKS if name not in left_out]


BENCHMARKS = {
    "submit_to_first_step": "first_step.measure",
    "short_jobs": "short_jobs",
    "step_time": "step_time.measure",
    "scripts": "scripts.measure",
    "script_steps": "scripts.steps",
    "status_get": "serving.status_get",
    "service_scale": "serving.scale",
    "sorted_lists": "serving.sorted_lists",
    "metrics": "serving.metrics",
    "cli_start_up": "serving.start_up",
    "onlookers": "serving.onlookers",
    "first_paint": "browsing.first_paint",
    "zoom_frames": "browsing.zoom_frames",
    "open_pages": "browsing.open_pages",
    "table_speed": "browsing.table_speed",
    "checkpoint_stall": "checkpoint_stall.measure",
    "recovery": "recovery.measure",
    "spares": "recovery.spares",
    "goodput": "goodput.measure",
    "equality": "equality.measure",
    "replica_checks": "replica_checks.measure",
    "wire": "wire.measure",
    "parameter_servers": "wire.servers",
    "server_replicas": "wire.replicas",
    "strategies": "strategies.measure",
    "large_batch": "large_batch.measure",
    "fine_tuning": "fine_tuning.measure",
    "federated": "federated.measure",
    "federated_speed": "federated.speed",
    "federated_http": "federated.over_http",
    "secure_aggregation": "federated.secure",
    "lossy": "lossy.measure",
    "planner": "planner.measure",
    "scheduler": "scheduler.measure",
    "scheduler_elastic": "scheduler.elastic",
    "scheduler_generated": "scheduler.generated.measure",
    "scheduler_backlog": "scheduler.generated.backlog",
    "scheduler_speed": "scheduler.speed",
    "scheduler_locality": "scheduler.locality",
    "queue_speed": "queue_speed.measure",
    "many_jobs": "many_jobs.measure",
    "system_metrics": "system_metrics.measure",
    "busy_ranks": "busy.answers",
    "busy_machine": "busy.steps",
    "topologies": "topologies.measure",
    "gpu": "gpu.measure",
}
"""The module of each benchmark. Imported only when needed, because some require additional
packages."""


def _tell(line: str) -> None:
    print(f"{datetime.now():%H:%M:%S}  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except machine.BenchmarkError as error:
        sys.exit(f"the measurement failed: {error}")
