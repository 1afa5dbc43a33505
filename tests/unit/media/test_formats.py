"""Files are recognised by their content, and files that could harm a reader are refused."""

from __future__ import annotations

import random

import pytest

from dray.media import formats
from tests.unit.media import files

SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
def test_pictures_of_pillow_have_their_size(seed: int) -> None:
    draw = random.Random(seed)
    form, media_type = draw.choice(
        [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp")]
    )
    modes = {"PNG": files.MODES, "JPEG": ("L", "RGB"), "WEBP": ("RGB", "RGBA")}[form]
    width, height = draw.randint(1, 300), draw.randint(1, 300)
    content = files.picture(form, width, height, draw.choice(modes), seed)
    assert formats.picture(content) == formats.PictureHeader(media_type, width, height)


@pytest.mark.parametrize("seed", SEEDS)
def test_sounds_have_their_length(seed: int) -> None:
    draw = random.Random(seed)
    channels, rate, width = draw.randint(1, 8), draw.choice([8000, 44_100]), draw.randint(1, 4)
    num_frames = draw.randint(0, 5000)
    found = formats.sound(files.sound(num_frames, channels, rate, width))
    expected = formats.SoundHeader("audio/wav", rate, channels, num_frames / rate)
    assert found == expected


@pytest.mark.parametrize("name", files.NO_PICTURES)
def test_what_is_no_picture_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"picture|file"):
        formats.picture(files.NO_PICTURES[name])


@pytest.mark.parametrize("name", files.NO_SOUNDS)
def test_what_is_no_sound_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"audio|WAV"):
        formats.sound(files.NO_SOUNDS[name])


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "WAV"])
def test_a_part_of_a_file_is_refused(form: str) -> None:
    content = files.sound() if form == "WAV" else files.picture(form)
    read = formats.sound if form == "WAV" else formats.picture
    read(content)
    # A RIFF file can be one byte shorter than it declares, because of the padding at its end.
    for end in range(len(content) - 1):
        with pytest.raises(ValueError, match=r"."):
            read(content[:end])


@pytest.mark.parametrize("seed", SEEDS)
def test_damaged_files_raise_nothing_but_value_errors(seed: int) -> None:
    draw = random.Random(seed)
    for form in ("PNG", "JPEG", "WEBP", "WAV"):
        whole = bytearray(files.sound() if form == "WAV" else files.picture(form, seed=seed))
        for _ in range(50):
            damaged = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                damaged[draw.randrange(min(len(damaged), 200))] = draw.randrange(256)
            for read in (formats.picture, formats.sound):
                try:
                    read(bytes(damaged))
                except ValueError:
                    continue
