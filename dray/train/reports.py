"""`report`: records metrics and media of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat, SupportsIndex, Unpack, overload

from dray.train import media, preparing, reporting
from dray.train.media import Media


@overload
def report(
    step: SupportsIndex,
    values: Mapping[str, SupportsFloat] | None = None,
    *,
    epoch: int | None = None,
    total_steps: int | None = None,
    samples_per_s: float | None = None,
    **given: Unpack[Media],
) -> None: ...


@overload
def report(
    step: Mapping[str, SupportsFloat] | None = None,
    **given: Unpack[Media],
) -> None: ...


def report(
    step: SupportsIndex | Mapping[str, SupportsFloat] | None = None,
    values: Mapping[str, SupportsFloat] | None = None,
    *,
    epoch: int | None = None,
    total_steps: int | None = None,
    samples_per_s: float | None = None,
    **given: Any,
) -> None:
    """Record metrics and media of one step of this rank, which the API serves as the job's metrics
    and media.

    step: number of optimizer steps done, 1 after the first step. Report each key once per step. In
        a prepared script, pass only the values: dray adds the step, the epoch and the total.
    values: real numbers, keyed by name; NaN and infinities are allowed. A key has 1 to 128
        printable characters, for example `val/accuracy`.
    epoch, total_steps, samples_per_s: shown as the job's progress if rank 0 reports them.
    given: media by kind and key, such as `histogram={"weights": tensor}`. The kinds are
        `histogram`, `image`, `audio`, `text`, `table`, `confusion_matrix`, `pr_curve` and
        `roc_curve`; see docs/guides/media.md for their values and limits.

    A call writes to local files, and never waits for the network. Raises ValueError for a key or a
    number that can't be stored, and TypeError for an object of the wrong type. Media that can't be
    stored are left out and counted, and the log states the reason. Does nothing outside of dray.
    """
    media.check(given)
    if step is None or isinstance(step, Mapping):
        if values is not None:
            raise TypeError("report() was given values without a step: pass the step first")
        if step is None and not given:
            raise TypeError("report() needs metrics or media, such as {'train/loss': loss}")
        _report_completed_step(step, given)
        return
    number = reporting.checked_count("step", step)
    if values is None and not given:
        raise TypeError("report() needs the metrics of the step, such as {'train/loss': loss}")
    if values is not None:
        reporting.report(
            number, values, epoch=epoch, total_steps=total_steps, samples_per_s=samples_per_s
        )
    media.send(number, given)


def _report_completed_step(
    values: Mapping[str, SupportsFloat] | None, given: Mapping[str, Any]
) -> None:
    """Record metrics and media of the step that was just completed, and the training progress."""
    prepared = preparing.check_prepared("report")
    session = prepared.session
    if session.is_void or session.is_skipping:
        return  # the step will be repeated, or was reported by another process
    if values is not None:
        # Accept a loss that requires a gradient.
        numbers = {
            key: value.detach() if hasattr(value, "detach") else value
            for key, value in values.items()
        }
        total = preparing.total_steps_of(prepared)
        reporting.report(session.steps, numbers, epoch=session.position.epoch, total_steps=total)
    media.send(session.steps, given)
