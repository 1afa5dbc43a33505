from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ray_workers.recipes.image_inputs import ImageForm
from ray_workers.training.core.errors import DataError

GREY, COLOURED = (1, 4, 6), (3, 4, 6)
PIXELS = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10
EXPECTED = torch.from_numpy(PIXELS).float()[None, None] / 255


def form(shape: tuple[int, int, int] = GREY) -> ImageForm:
    return ImageForm(shape, shape[1:], is_fixed=True)


def test_grey_images_are_taken_as_people_have_them(tmp_path: Path) -> None:
    picture = Image.fromarray(PIXELS)
    picture.save(tmp_path / "x.png")
    given: list[Any] = [
        *(PIXELS, PIXELS[None], PIXELS[:, :, None], PIXELS[None, None], PIXELS[None, :, :, None]),
        *(PIXELS / 255, torch.from_numpy(PIXELS), EXPECTED, picture, tmp_path / "x.png"),
        *(str(tmp_path / "x.png"), picture.convert("RGB")),
    ]
    for one in given:
        torch.testing.assert_close(form().tensor(one), EXPECTED)
        torch.testing.assert_close(form().tensor([one, picture]), EXPECTED.repeat(2, 1, 1, 1))
    assert form().tensor(np.stack([PIXELS] * 5)).shape == (5, *GREY)
    assert form().tensor([]).shape == (0, *GREY)


def test_colours_may_come_first_or_last() -> None:
    last = np.stack([PIXELS, PIXELS // 2, PIXELS // 3], axis=2)
    expected = torch.from_numpy(last.transpose(2, 0, 1)).float()[None] / 255
    for one in (last, last[None], last.transpose(2, 0, 1), Image.fromarray(last)):
        torch.testing.assert_close(form(COLOURED).tensor(one), expected)


def test_a_file_is_scaled_to_what_the_model_was_trained_on(tmp_path: Path) -> None:
    Image.fromarray(np.repeat(PIXELS, 2, axis=0)).save(tmp_path / "x.png")
    assert form().tensor(tmp_path / "x.png").shape == (1, *GREY)
    as_it_is = ImageForm(GREY, None, is_fixed=False)
    assert as_it_is.tensor(tmp_path / "x.png").shape == (1, 1, 8, 6)


@pytest.mark.parametrize(
    ("images", "fault"),
    [
        (
            np.zeros((2, 5, 5)),
            "are 5 x 5 pixels with 1 channel, but the model was",
        ),
        (np.zeros((2, 3, 4, 6)), r"shape \(2, 3, 4, 6\) does not contain images with 1 channels"),
        ([np.zeros((4, 6)), np.zeros((5, 6))], "the same size, but these are 4 x 6"),
    ],
)
def test_errors_name_the_fault_of_an_array(images: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        form().tensor(images)


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_text("text")
    with pytest.raises(DataError, match=r"x\.png: is not a readable image"):
        form().tensor(tmp_path / "x.png")
