"""`python -m benchmarks`: measure, print, and keep the figures under benchmarks/results."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import machine, report

RESULTS = Path(__file__).resolve().parent / "results"
Progress = Callable[[str], None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--rounds", type=int, default=10, help="of each contender (10)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures are kept")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown or options.rounds < 2:
        parser.error(f"there is no {', '.join(unknown)}" if unknown else "--rounds is at least 2")
    # The SDK reads DRAY_*; what is measured is the defaults.
    for name in [name for name in os.environ if name.startswith(("DRAY_", "RAY_"))]:
        del os.environ[name]
    for name in options.names or _possible():
        taken_at = datetime.now(UTC).isoformat(timespec="seconds")
        result = BENCHMARKS[name](options.rounds, _tell)
        print(report.write(result, machine.describe(), taken_at, options.out), flush=True)
    return 0


def _possible() -> list[str]:
    """All but those that need what is not here, which are named."""
    import torch

    from benchmarks.browsing.browser import lacks_browser
    from benchmarks.scheduler.measure import DATA, data_folder

    left_out = set()
    if not torch.cuda.is_available():
        _tell("gpu is left out: there is none")
        left_out.add("gpu")
    if data_folder() is None:
        _tell(f"replays are left out: {DATA} names no folder with traces")
        left_out |= {"scheduler", "scheduler_frontier", "scheduler_elastic"}
    if lacks_browser():
        _tell("first_paint and open_pages are left out: there is no chromium or no playwright")
        left_out |= {"first_paint", "open_pages"}
    return [name for name in BENCHMARKS if name not in left_out]


def _gpu(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.gpu.measure import measure

    return measure(num_rounds, progress)


def _first_step(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.first_step.measure import measure

    return measure(num_rounds, progress)


def _short_jobs(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.short_jobs import measure

    return measure(num_rounds, progress)


def _step_time(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.step_time.measure import measure

    return measure(num_rounds, progress)


def _script_steps(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.scripts import steps

    return steps.measure(num_rounds, progress)


def _scripts(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.scripts.measure import measure

    return measure(num_rounds, progress)


def _scheduler(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.scheduler.measure import measure

    return measure(num_rounds, progress)


def _scheduler_frontier(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.scheduler.frontier import measure

    return measure(num_rounds, progress)


def _scheduler_elastic(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.scheduler.elastic import measure

    return measure(num_rounds, progress)


def _scheduler_speed(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.scheduler.speed import measure

    return measure(num_rounds, progress)


def _scheduler_locality(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.scheduler.locality import measure

    return measure(num_rounds, progress)


def _queue_speed(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.queue_speed.measure import measure

    return measure(num_rounds, progress)


def _many_jobs(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.many_jobs.measure import measure

    return measure(num_rounds, progress)


def _system_metrics(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.system_metrics.measure import measure

    return measure(num_rounds, progress)


def _topologies(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.topologies.measure import measure

    return measure(num_rounds, progress)


def _status_get(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.serving.status_get import measure

    return measure(num_rounds, progress)


def _service_scale(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.serving.scale import measure

    return measure(num_rounds, progress)


def _metrics(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.serving.metrics import measure

    return measure(num_rounds, progress)


def _cli_start_up(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.serving.start_up import measure

    return measure(num_rounds, progress)


def _onlookers(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.serving.onlookers import measure

    return measure(num_rounds, progress)


def _first_paint(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.browsing.first_paint import measure

    return measure(num_rounds, progress)


def _open_pages(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.browsing.open_pages import measure

    return measure(num_rounds, progress)


def _checkpoint_stall(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.checkpoint_stall.measure import measure

    return measure(num_rounds, progress)


def _recovery(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.recovery.measure import measure

    return measure(num_rounds, progress)


def _goodput(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.goodput.measure import measure

    return measure(num_rounds, progress)


def _equality(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.equality.measure import measure

    return measure(num_rounds, progress)


def _wire(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.wire.measure import measure

    return measure(num_rounds, progress)


def _parameter_servers(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.wire.servers import measure

    return measure(num_rounds, progress)


def _server_replicas(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.wire.replicas import measure

    return measure(num_rounds, progress)


def _large_batch(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.large_batch.measure import measure

    return measure(num_rounds, progress)


def _lossy(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.lossy.measure import measure

    return measure(num_rounds, progress)


def _strategies(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.strategies.measure import measure

    return measure(num_rounds, progress)


def _planner(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.planner.measure import measure

    return measure(num_rounds, progress)


def _federated(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.federated.measure import measure

    return measure(num_rounds, progress)


def _federated_speed(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.federated.speed import measure

    return measure(num_rounds, progress)


def _federated_http(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.federated.over_http import measure

    return measure(num_rounds, progress)


def _secure_aggregation(num_rounds: int, progress: Progress) -> report.Result:
    from benchmarks.federated.secure import measure

    return measure(num_rounds, progress)


BENCHMARKS: dict[str, Callable[[int, Progress], report.Result]] = {
    "submit_to_first_step": _first_step,
    "short_jobs": _short_jobs,
    "step_time": _step_time,
    "scripts": _scripts,
    "script_steps": _script_steps,
    "status_get": _status_get,
    "service_scale": _service_scale,
    "metrics": _metrics,
    "cli_start_up": _cli_start_up,
    "onlookers": _onlookers,
    "first_paint": _first_paint,
    "open_pages": _open_pages,
    "checkpoint_stall": _checkpoint_stall,
    "recovery": _recovery,
    "goodput": _goodput,
    "equality": _equality,
    "wire": _wire,
    "parameter_servers": _parameter_servers,
    "server_replicas": _server_replicas,
    "strategies": _strategies,
    "large_batch": _large_batch,
    "federated": _federated,
    "federated_speed": _federated_speed,
    "federated_http": _federated_http,
    "secure_aggregation": _secure_aggregation,
    "lossy": _lossy,
    "planner": _planner,
    "scheduler": _scheduler,
    "scheduler_frontier": _scheduler_frontier,
    "scheduler_elastic": _scheduler_elastic,
    "scheduler_speed": _scheduler_speed,
    "scheduler_locality": _scheduler_locality,
    "queue_speed": _queue_speed,
    "many_jobs": _many_jobs,
    "system_metrics": _system_metrics,
    "topologies": _topologies,
    "gpu": _gpu,
}


def _tell(line: str) -> None:
    print(f"{datetime.now():%H:%M:%S}  {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except machine.BenchmarkError as error:
        sys.exit(f"The measurement could not be taken: {error}")
