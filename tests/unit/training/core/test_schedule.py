from __future__ import annotations

from typing import Any

import pytest

from dray.spec import Checkpoint, LrScaling, Schedule, Train
from ray_workers.training.core.schedule import Calendar, lr_at, rate_factor, scaled_lr


def rates(schedule: Schedule, total_steps: int, lr: float = 1.0) -> list[float]:
    return [
        lr_at(step, total_steps=total_steps, lr=lr, schedule=schedule)
        for step in range(1, total_steps + 1)
    ]


def test_constant_stays_after_a_linear_warm_up() -> None:
    assert rates(Schedule(warmup_steps=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_from_the_peak_halves_in_the_middle_and_never_wastes_a_step() -> None:
    values = rates(Schedule(name="cosine", warmup_steps=2), 12)
    assert values[:3] == [0.5, 1.0, 1.0]
    assert values[7] == pytest.approx(0.5)
    assert values[2:] == sorted(values[2:], reverse=True)
    assert values[-1] > 0.0


def test_cosine_approaches_the_final_ratio() -> None:
    values = rates(Schedule(name="cosine", final_ratio=0.1), 10_000, lr=2.0)
    assert values[-1] == pytest.approx(0.2, abs=1e-6)
    assert min(values) >= 0.2


def test_a_single_step_is_taken_at_the_full_rate() -> None:
    assert rates(Schedule(name="cosine"), 1) == [1.0]


def test_a_warm_up_longer_than_the_run_ends_below_the_peak() -> None:
    assert rates(Schedule(name="cosine", warmup_steps=10), 3) == [0.1, 0.2, 0.3]


def test_max_steps_shortens_the_run_and_never_lengthens_it() -> None:
    def total(max_steps: int | None) -> int:
        options = Train(epochs=3, max_steps=max_steps)
        return Calendar.of(options, Checkpoint(), steps_per_epoch=6).total_steps

    assert [total(None), total(10), total(100)] == [18, 10, 18]


def test_epochs_are_evaluated_and_saved_at_their_ends_and_at_the_end_of_training() -> None:
    options = Train(epochs=4, max_steps=20, eval_every_epochs=2)
    calendar = Calendar.of(options, Checkpoint(), steps_per_epoch=6)
    steps = range(1, 21)
    assert [s for s in steps if calendar.saves_after(s)] == [6, 12, 18, 20]
    assert [s for s in steps if calendar.evaluates_after(s)] == [12, 20]


def test_a_checkpoint_that_could_be_the_best_is_measured_first() -> None:
    checkpoint = Checkpoint(every_steps=5, best="val/accuracy")
    calendar = Calendar.of(Train(epochs=2), checkpoint, steps_per_epoch=6)
    steps = range(1, 13)
    assert [s for s in steps if calendar.saves_after(s)] == [5, 10, 12]
    assert [s for s in steps if calendar.evaluates_after(s)] == [5, 6, 10, 12]


def test_an_interval_that_rank_0_chooses_leaves_the_calendar_the_same_on_every_rank() -> None:
    """Saves in the calendar need all ranks, while the saves in between are made by rank 0 alone."""
    options = Train(epochs=4, max_steps=20, eval_every_epochs=2)
    steps = range(1, 21)
    calendar = Calendar.of(options, Checkpoint(every_steps="auto"), steps_per_epoch=6)
    assert [s for s in steps if calendar.saves_after(s)] == [20]
    assert [s for s in steps if calendar.evaluates_after(s)] == [12, 20]
    best = Checkpoint(every_steps="auto", best="val/accuracy")
    calendar = Calendar.of(options, best, steps_per_epoch=6)
    assert [s for s in steps if calendar.saves_after(s)] == [12, 20]
    assert [s for s in steps if calendar.evaluates_after(s)] == [12, 20]


def test_the_last_step_of_an_epoch_belongs_to_it() -> None:
    calendar = Calendar.of(Train(epochs=2), Checkpoint(), steps_per_epoch=6)
    assert [calendar.epoch_of(step) for step in (1, 6, 7, 12)] == [0, 0, 1, 1]


def test_a_line_falls_evenly_to_the_final_ratio() -> None:
    values = rates(Schedule(name="linear", final_ratio=0.5, warmup_steps=2), 6)
    assert values == pytest.approx([0.5, 1.0, 1.0, 0.875, 0.75, 0.625])


def test_steps_fall_by_a_factor_and_warm_up_is_not_counted() -> None:
    values = rates(Schedule(name="step", every_steps=2, factor=0.5, warmup_steps=1), 6)
    assert values == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.8), ("sqrt", 0.2 * 2.0)])
def test_the_rate_grows_with_the_batch_by_the_rule(rule: Any, expected: float) -> None:
    scaling = LrScaling(rule=rule, reference_batch_size=64)
    assert scaled_lr(0.2, scaling, 256) == pytest.approx(expected)
    assert scaled_lr(0.2, None, 256) == 0.2


def test_a_batch_of_several_steps_ends_with_an_epoch_a_checkpoint_and_the_training() -> None:
    def ends(num_steps: int, every_steps: int | None = None) -> list[int]:
        options = Train(epochs=2, max_steps=17)
        calendar = Calendar.of(options, Checkpoint(every_steps=every_steps), steps_per_epoch=10)
        found = [0]
        while found[-1] < calendar.total_steps:
            found.append(calendar.last_of(found[-1] + 1, num_steps))
        return found[1:]

    assert ends(1) == list(range(1, 18))
    assert ends(4) == [4, 8, 10, 14, 17]
    assert ends(4, every_steps=5) == [4, 5, 9, 10, 14, 15, 17]
    assert ends(50) == [10, 17]


def test_the_rate_follows_the_batch_within_its_range_by_the_rule() -> None:
    options = Train(global_batch_size=64, batch_range=(32, 256))
    assert [rate_factor(size, options) for size in (16, 64, 256)] == [0.5, 1.0, 2.0]
    assert rate_factor(256, Train(global_batch_size=64)) == 1.0
    linear = options.model_copy(update={"batch_scaling": "linear"})
    assert [rate_factor(size, linear) for size in (16, 64, 256)] == [0.25, 1.0, 4.0]
