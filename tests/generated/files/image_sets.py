"""Generated image sets: folders and archives, with or without masks and splits."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np

from dray.spec import Data
from ray_workers.datasets import open_images, open_masked_images
from ray_workers.shared.node_needs import DataPolicy
from tests.generated.files.cases import Refusal, outcome, without
from tests.generated.files.pictures import (
    BROKEN,
    FORMS,
    MASK_FORMS,
    ODD_FORMS,
    REFUSED_MASKS,
    SIZE,
    TURNED_FORMS,
    TURNED_SUFFIXES,
    Mask,
    Picture,
    doubled,
)

JUNK = (
    *(".DS_Store", "Thumbs.db", "__MACOSX/a/._x.png", "a/.hidden.png", "@eaDir/x.png", "notes.txt"),
    *("a/desktop.ini", ".ipynb_checkpoints/x.png", "a/__MACOSX/x.png", "b/Thumbs.DB"),
)
LAYOUTS = ("classes", "classes", "splits", "splits below", "masks", "masks", "one", "loose")
CONTAINERS = ("", "", "", ".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
TOPS = ("", "my set", "set-main/set", "a/b/c", ".")
EMPTY_FOLDERS = ("zebra", "zebra/below", "val", "a/nothing")
BAD_MEMBERS = {"above": "../a/x.png", "absolute": "/a/x.png", "backslash": "a\\x.png"}
BAD_TYPES = {
    "link": (tarfile.SYMTYPE, "is a link"),
    "hard link": (tarfile.LNKTYPE, "is a link"),
    "pipe": (tarfile.FIFOTYPE, "is not a regular file"),
    "device": (tarfile.CHRTYPE, "is not a regular file"),
}


@dataclass(frozen=True)
class ImageCase:
    layout: str
    pictures: tuple[Picture, ...]
    masks: tuple[Mask, ...] = ()
    junk: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    """Folders without a file."""
    container: str = ""
    """Suffix of an archive, or nothing for a folder."""
    top: str = ""
    """Folders of the archive that contain all others."""
    bad_member: str = ""
    """Kind of a forbidden archive member."""
    doubles: bool = False
    """Whether the archive contains its first member twice, the first time with another image."""
    is_cut: bool = False
    """Whether the end of the archive is missing."""
    scale: int = 1

    # What is written.

    def files(self) -> list[tuple[str, bytes]]:
        files = [(one.path, one.content()) for one in self.pictures]
        files += [(one.path, one.content()) for one in self.masks]
        return files + [(path, b"junk") for path in self.junk]

    def write(self, folder: Path) -> Path:
        if not self.container:
            for name in self.empty:
                (folder / "set" / name).mkdir(parents=True, exist_ok=True)
            for name, content in self.files():
                path = folder / "set" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return folder / "set"
        path = folder / f"set{self.container}"
        top = "./" if self.top == "." else f"{self.top}/" if self.top else ""
        members = [(f"{top}{name}/", b"") for name in self.empty]
        members += [(top + name, data) for name, data in self.files()]
        if self.doubles:
            other = replace(self.pictures[0], form="RGB", seed=self.pictures[0].seed + 1, turned=1)
            members.insert(0, (top + other.path, other.content()))
        (self._write_zip if self.container == ".zip" else self._write_tar)(path, members)
        if self.is_cut:
            whole = path.read_bytes().rstrip(b"\0")  # a tar archive ends with padding
            path.write_bytes(whole[: len(whole) // 2 | 1])
        return path

    def _write_zip(self, path: Path, members: list[tuple[str, bytes]]) -> None:
        packing = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[len(members) % 2]
        with zipfile.ZipFile(path, "w", packing) as archive:
            for name, data in members:
                archive.writestr(zipfile.ZipInfo(name), data, packing)
            if self.bad_member:
                info = zipfile.ZipInfo(BAD_MEMBERS.get(self.bad_member, "a/link.png"))
                if self.bad_member == "link":
                    info.external_attr = 0o120777 << 16
                archive.writestr(info, b"../../etc/passwd")

    def _write_tar(self, path: Path, members: list[tuple[str, bytes]]) -> None:
        packing = {".gz": "w:gz", ".tgz": "w:gz", ".xz": "w:xz", ".bz2": "w:bz2"}
        with tarfile.open(path, packing.get(path.suffix, "w")) as archive:  # type: ignore[call-overload]
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            if self.bad_member:
                info = tarfile.TarInfo(BAD_MEMBERS.get(self.bad_member, "a/link.png"))
                if self.bad_member in BAD_TYPES:
                    info.type, info.linkname = BAD_TYPES[self.bad_member][0], "/etc/passwd"
                archive.addfile(info, io.BytesIO(b""))

    # The contents.

    def role(self, path: str) -> str:
        parts = {part.lower() for part in PurePosixPath(path).parts[:-1]}
        if self.layout not in ("splits", "splits below"):
            return "train"
        return next((one for one in ("val", "test") if one in parts), "train")

    def label(self, path: str) -> str:
        folders = PurePosixPath(path).parts[:-1]
        return next(name for name in folders if name not in ("train", "val", "test"))

    def used(self) -> list[Picture]:
        used = [one for one in self.pictures if self.role(one.path) != "test"]
        return sorted(used, key=lambda one: one.path)

    def refusals(self) -> list[Refusal]:
        if self.bad_member:
            leads = (
                "has a backslash" if self.bad_member == "backslash" else "outside the target folder"
            )
            return [Refusal(BAD_TYPES.get(self.bad_member, (b"", leads))[1])]
        if self.is_cut:
            return [Refusal(f"set{self.container}", "or is incomplete")]
        found = []
        for one in self.used():
            name = PurePosixPath(one.path).name
            if one.fault:
                found.append(Refusal(name, "image"))
            if one.is_deep:
                found += [Refusal(name, "mode"), Refusal(name, "16-bit channels")]
            elif one.form == "frames":
                found.append(Refusal(name, "pages or frames"))
            if one.size != SIZE and not one.fault:
                found.append(Refusal("pixels (height x width)"))
        if self.layout == "one":
            found.append(Refusal("only one class"))
        if self.layout == "loose":
            found.append(Refusal("is not in a class folder"))
            if self.container and self.top not in ("", "."):  # whose last folder is then the class
                found.append(Refusal("only one class", PurePosixPath(self.top).name))
        if self.layout == "mixed":
            is_one = len({PurePosixPath(one.path).parts[0] for one in self.pictures}) == 1
            found.append(Refusal("only one class" if is_one else "named like the parts of a split"))
        return found + self._refusals_of_masks()

    def _refusals_of_masks(self) -> list[Refusal]:
        refused = [one for one in self.masks if one.form in REFUSED_MASKS]
        found = [Refusal(PurePosixPath(m.path).name, REFUSED_MASKS[m.form]) for m in refused]
        values = {int(value) for one in self.masks for value in np.unique(one.numbers())}
        if 255 in values and values != {0, 255}:
            found.append(Refusal("has a pixel with the value 255"))
        return found

    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        size = (SIZE[1] * self.scale, SIZE[0] * self.scale) if self.scale != 1 else None
        data = Data(source=self.write(folder).as_uri(), format="images", image_size=size)
        read = open_masked_images if self.masks else open_images
        found, fault = outcome(lambda: read(data, policy), self.refusals())
        return self._differs(found) if found is not None else fault

    def _differs(self, found: Any) -> str | None:
        used = self.used()
        is_grey = all(one.is_grey for one in used)
        if len(found.pixels) != len(used):
            return f"{len(found.pixels)} images, expected {len(used)}"
        if found.num_left_out != len(self.pictures) - len(used):
            return f"{found.num_left_out} are left out"
        classes = sorted({self.label(one.path) for one in used}) if not self.masks else []
        if not self.masks and list(found.classes) != classes:
            return f"the classes are {found.classes}, expected {classes}"
        for at, one in enumerate(used):
            expected = one.shown(grey=is_grey)
            if self.scale == 2:
                expected = doubled(expected, smooth=True)
            off = np.abs(found.pixels[at].astype(int) - expected).max()
            if off > ("A" in one.form) + (self.scale > 1):
                return f"{one.path} ({one.form}, turned {one.turned}): a pixel is off by {off}"
            if self.masks:
                continue
            if found.classes[found.labels[at]] != self.label(one.path):
                return f"{one.path} is {found.classes[found.labels[at]]}"
            is_validation = found.is_validation is not None and found.is_validation[at]
            if (self.role(one.path) == "val") != bool(is_validation):
                return f"{one.path} is in the wrong part"
        return self._masks_differ(found, used) if self.masks else None

    def _masks_differ(self, found: Any, used: list[Picture]) -> str | None:
        by_stem = {mask.stem: mask for mask in self.masks}
        masks = [by_stem[PurePosixPath(one.path).stem] for one in used]
        numbers = np.stack([mask.numbers() for mask in masks]).astype(int)
        if {*np.unique(numbers).tolist()} == {0, 255}:
            numbers //= 255
        classes = [str(at) for at in range(int(numbers.max()) + 1)]
        if list(found.classes) != classes:
            return f"the classes are {found.classes}, expected {classes}"
        if self.scale == 2:
            numbers = doubled(numbers, smooth=False)
        for at, mask in enumerate(masks):
            if not np.array_equal(found.masks[at], numbers[at]):
                return f"{mask} is {found.masks[at].tolist()}, expected {numbers[at].tolist()}"
        return None

    def smaller(self) -> Iterator[Self]:
        if self.container and not (self.bad_member or self.is_cut):
            yield replace(self, container="", top="", doubles=False)
        for change in ({"empty": ()}, {"scale": 1}):
            less = replace(self, **change)
            if less != self:
                yield less
        for at in range(len(self.junk)):
            yield replace(self, junk=without(self.junk, at))
        for at in range(len(self.pictures) if len(self.pictures) > 2 else 0):
            masks = without(self.masks, at) if self.masks else ()
            yield replace(self, pictures=without(self.pictures, at), masks=masks)


def draw(seed: int) -> ImageCase:
    dice = random.Random(f"images {seed}")
    layout = dice.choice((*LAYOUTS, "mixed"))
    pictures = _pictures(dice, seed, layout)
    case = ImageCase(layout, pictures)
    if layout == "masks":
        case = replace(case, masks=_masks(dice, pictures))
    if dice.random() < 0.2 and all(one.size == SIZE for one in pictures):
        case = replace(case, scale=2)
    container = dice.choice(CONTAINERS)
    junk = tuple(dice.sample(JUNK, dice.choice((0, 0, 1, 3))))
    empty = tuple(dice.sample(EMPTY_FOLDERS, 2)) if dice.random() < 0.15 else ()
    case = replace(case, junk=junk, empty=empty, container=container)
    if container:
        kinds = (*BAD_MEMBERS, "link") if container == ".zip" else (*BAD_MEMBERS, *BAD_TYPES)
        bad = dice.choice(kinds) if dice.random() < 0.1 else ""
        doubles = dice.random() < 0.1 and not pictures[0].fault
        is_cut = not bad and dice.random() < 0.04
        top = dice.choice(TOPS)
        case = replace(case, top=top, bad_member=bad, doubles=doubles, is_cut=is_cut)
    return case


def _pictures(dice: random.Random, seed: int, layout: str) -> tuple[Picture, ...]:
    suffixes = dice.sample(list(FORMS), dice.randint(1, 3))
    labels = dice.sample(("a", "b", "Cats", "dögs", "with space", "0"), dice.randint(2, 4))
    odd, turns, is_uneven = (dice.random() < share for share in (0.12, 0.4, 0.2))
    count = dice.randint(4, 10)
    if dice.random() < 0.003:
        count, suffixes, odd = 1_500, ["png"], False
    other_size = dice.randrange(count) if dice.random() < 0.04 else None
    pictures = []
    for number in range(count):
        suffix = dice.choice(suffixes)
        form = dice.choice([f for f in FORMS[suffix] if odd or f not in ODD_FORMS])
        can_turn = turns and suffix in TURNED_SUFFIXES and form in TURNED_FORMS
        turned = dice.randint(1, 8) if can_turn else 1
        fault = dice.choice(BROKEN) if dice.random() < 0.04 / count else ""
        size = (SIZE[1], SIZE[0]) if number == other_size and count > 1 else SIZE
        label = labels[min(number, len(labels) - 1) if is_uneven else number % len(labels)]
        part = ("train", "val", "test")[number // len(labels) % 3]
        path = _path(layout, number, _name(dice, number, suffix), labels, label, part)
        pictures.append(Picture(path, form, 10_000 * seed + number, fault, turned, size))
    return tuple(pictures)


def _name(dice: random.Random, number: int, suffix: str) -> str:
    name = f"{number}.{suffix}"
    if dice.random() < 0.1:
        name = name.upper()
    if suffix in ("jpg", "tif") and dice.random() < 0.1:
        name = name.lower().replace("jpg", "jpeg").replace(".tif", ".tiff")
    return name


def _path(layout: str, number: int, name: str, labels: list[str], label: str, part: str) -> str:
    return {
        "classes": f"{label}/{name}",
        "splits": f"{part}/{label}/{name}",
        "splits below": f"{label}/{part}/{name}",
        "masks": f"images/{name}",
        "one": f"{labels[0]}/{name}",
        "loose": f"{label}/{name}" if number else name,
        "mixed": f"{part}/{name}" if number < 2 * len(labels) else f"{label}/{name}",
    }[layout]


def _masks(dice: random.Random, pictures: tuple[Picture, ...]) -> tuple[Mask, ...]:
    sound = [form for form in MASK_FORMS if form not in (*REFUSED_MASKS, "stray 255")]
    forms = dice.sample(sound, dice.choice((1, 1, 2)))
    turns = dice.random() < 0.3
    masks = []
    for number, one in enumerate(pictures):
        form = dice.choice(forms)
        turned = dice.randint(1, 8) if turns and MASK_FORMS[form] == ".png" else 1
        masks.append(Mask(PurePosixPath(one.path).stem, form, one.seed + number, turned))
    if dice.random() < 0.12:
        at = dice.randrange(len(masks))
        form = dice.choice([*REFUSED_MASKS, "stray 255"])
        masks[at] = replace(masks[at], form=form, turned=1)
    return tuple(masks)
