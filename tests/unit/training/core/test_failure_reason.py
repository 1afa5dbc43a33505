"""One sentence describes an error, regardless of where it was raised."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ray_workers.training.checkpoint.interval import young_interval_s
from ray_workers.training.core.errors import DataError
from ray_workers.training.core.failure_reason import MAX_CHARS, reason_of


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        raise KeyError("income")


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_in_a_loader_process_has_its_own_message_and_location() -> None:
    with pytest.raises(KeyError) as caught:
        next(iter(DataLoader(Rows(), num_workers=1)))
    said = reason_of(caught.value)
    assert said.startswith("KeyError: 'income' (in DataLoader worker process 0, ")
    assert "test_failure_reason.py, line 21)" in said


def fail(number: int) -> None:
    raise ValueError(f"row {number}")


def test_an_error_in_a_pool_has_the_location_there() -> None:
    with (
        multiprocessing.get_context("fork").Pool(1) as pool,
        pytest.raises(ValueError, match="row 7") as caught,
    ):
        pool.apply(fail, (7,))
    assert reason_of(caught.value).startswith("ValueError: row 7 (")
    assert reason_of(caught.value).endswith("test_failure_reason.py, line 38)")


def test_an_exception_group_has_the_message_and_location_of_its_first_error() -> None:
    def begin() -> None:
        try:
            fail(7)
        except ValueError as error:
            raise ExceptionGroup("unhandled errors in a TaskGroup", [error]) from None

    with pytest.raises(ExceptionGroup) as caught:
        begin()
    said = reason_of(caught.value)
    assert said.startswith("ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception) (")
    assert "caused by ValueError: row 7 (" in said
    assert said.endswith("test_failure_reason.py, line 38)")


def test_the_location_is_never_in_drays_own_code() -> None:
    with pytest.raises(ValueError, match="math domain error") as caught:
        young_interval_s(-1.0, 1.0)
    assert "test_failure_reason.py, line " in reason_of(caught.value)


def test_a_sentence_of_drays_own_stays_as_it_is() -> None:
    assert reason_of(DataError("data.source is empty")) == "data.source is empty"


@pytest.mark.parametrize("error", [Mute(), ValueError("x" * 10**6), ValueError("a\nb"), KeyError()])
def test_a_reason_is_one_short_line_with_the_type(error: Exception) -> None:
    said = reason_of(error)
    assert said.startswith(type(error).__name__)
    assert "\n" not in said
    assert len(said) <= MAX_CHARS
