"""The result of training, and the log messages for evaluations and early stopping."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dray import spec, train
from dray.train import storage_faults
from dray.train.prepared.dtensor import whole_of
from ray_workers.shared import job_log
from ray_workers.training.core.schedule import Calendar
from ray_workers.training.core.workload import Trained, Workload
from ray_workers.training.loop import weight_files
from ray_workers.training.parallel import Strategy


def trained(
    strategy: Strategy, parallel: spec.Parallel, *, waiting: Callable[[], None]
) -> Trained | None:
    """Return the trained model on rank 0 or, if the model is divided, store its weights. A
    collective. waiting: see `store`."""
    if parallel.num_parts > 1 and strategy.given.workload.gathers_result:
        state = strategy.update.weights.state_dict()
        return {name: whole_of(tensor) for name, tensor in state.items()}
    if parallel.num_parts > 1:
        return weight_files.store(strategy, parallel.num_parts, waiting=waiting)
    return strategy.trained()


def store(
    workload: Workload,
    trained: Trained,
    metrics: Mapping[str, float],
    step: int,
    *,
    waiting: Callable[[], None],
) -> None:
    """Store the recipe's result files as artifacts of the job.

    If the storage is full, wait for free space, and call `waiting` during the wait, so that the
    rank is not considered hung.
    """

    def write() -> None:
        with TemporaryDirectory(prefix="dray-result-") as folder:
            workload.write_results(trained, dict(metrics), step, Path(folder))
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    train.store_artifact(path, path.relative_to(folder).as_posix())

    storage_faults.wait_for_space("the result", write, waiting=waiting)


def store_files(files: Mapping[str, Mapping[str, Any]]) -> None:
    """Store JSON documents as artifacts of the job."""
    with TemporaryDirectory(prefix="dray-files-") as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
            train.save_artifact(path)


def log_end(document: spec.JobSpec, step: int, total_steps: int) -> None:
    """Log why training ended after this step, unless it reached its last step."""
    if step < total_steps:
        report_early_stop(document.train, step, total_steps)
    else:
        log_spent_privacy(document.federated, step)


def report_early_stop(options: spec.Train, step: int, total_steps: int) -> None:
    """Log and report that the job ends after `step`, which is now its last step."""
    rule = options.early_stopping
    assert rule is not None
    job_log.log(
        f"stopped early after step {step} of {total_steps}: "
        f"{rule.metric} has not improved for {rule.patience} evaluations"
    )
    train.report(step, {}, total_steps=step)


def log_spent_privacy(options: spec.Federated | None, step: int) -> None:
    """Log a message if the job ends after this round because another round would exceed the privacy
    budget."""
    if options is None or options.privacy is None or step >= options.rounds:
        return
    job_log.log(
        f"training ended after round {step} of {options.rounds}, because another round would "
        f"exceed federated.privacy.epsilon, which is {options.privacy.epsilon:g}"
    )


def of_evaluation(calendar: Calendar, step: int, metrics: Mapping[str, float]) -> str:
    """Return the log message for an evaluation."""
    figures = ", ".join(f"{key} {value:.4g}" for key, value in sorted(metrics.items()))
    return f"epoch {calendar.epoch_of(step)}, step {step} of {calendar.total_steps}: {figures}"
