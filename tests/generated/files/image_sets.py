"""Drawn sets of images: folders and archives, with or without masks and divisions."""

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
from PIL import Image, ImageOps

from dray.spec import Data
from ray_workers.datasets import open_images, open_masked_images
from ray_workers.shared.node_needs import DataPolicy
from tests.generated.files.cases import Refusal, outcome, without

SIZE = (6, 5)
"""(width, height)"""
JUNK = (
    *(".DS_Store", "Thumbs.db", "__MACOSX/a/._x.png", "a/.hidden.png", "@eaDir/x.png", "notes.txt"),
    *("a/desktop.ini", ".ipynb_checkpoints/x.png", "a/__MACOSX/x.png", "b/Thumbs.DB"),
)
FORMS = {
    "png": ("1", "L", "LA", "P", "P+t", "RGB", "RGBA", "I;16", "RGB+o", "P;2"),
    "bmp": ("1", "L", "P", "RGB"),
    "gif": ("L", "P", "P+t", "frames"),
    "tif": ("1", "L", "RGB", "RGBA", "CMYK", "I;16", "F", "I", "frames", "LA", "RGB+o"),
    "jpg": ("L", "RGB", "CMYK", "RGB+o"),
    "webp": ("RGB", "RGBA", "frames"),
}
FORMATS = {"tif": "TIFF", "jpg": "JPEG"}
"""Pillow's names of those that it calls otherwise."""
BROKEN = ("empty", "truncated", "no image")
LAYOUTS = ("classes", "classes", "splits", "splits below", "masks", "one", "loose", "mixed")


@dataclass(frozen=True)
class Picture:
    path: str
    form: str
    seed: int
    fault: str = ""

    def content(self) -> bytes:
        data = io.BytesIO()
        image, options = self.image()
        suffix = PurePosixPath(self.path).suffix[1:].lower()
        image.save(data, FORMATS.get(suffix, suffix.upper()), **options)
        whole = data.getvalue()
        match self.fault:
            case "empty":
                return b""
            case "truncated":
                return whole[: len(whole) * 2 // 3]
            case "no image":
                return b"<html>not found</html>"
        return whole

    def image(self) -> tuple[Any, dict[str, Any]]:
        """(an image of Pillow's, options to save it with)."""
        dice = np.random.default_rng(self.seed)
        shape = SIZE[::-1]
        options: dict[str, Any] = {}
        match self.form:
            case "1":
                return Image.fromarray(dice.integers(0, 2, shape, np.uint8) * 255).convert("1"), {}
            case "I;16":
                return Image.fromarray(dice.integers(0, 65_536, shape, np.uint16)), {}
            case "F":
                return Image.fromarray(dice.random(shape, np.float32)), {}
            case "I":
                return Image.fromarray(dice.integers(0, 65_536, shape, np.int32)), {}
            case "P" | "P+t" | "P;2":
                image = Image.fromarray(dice.integers(0, 4, shape, np.uint8), "P")
                image.putpalette([*dice.integers(0, 256, 12).tolist()])
                if self.form == "P+t":
                    options["transparency"] = 1
                if self.form == "P;2":
                    options["bits"] = 2
                return image, options
            case "frames":
                options |= {"save_all": True, "append_images": [self._plain(dice, "RGB")]}
                return self._plain(dice, "RGB"), options
            case "RGB+o":
                image = self._plain(dice, "RGB")
                exif = image.getexif()
                exif[0x0112] = int(dice.integers(1, 9))
                return image, {"exif": exif}
        return self._plain(dice, self.form), options

    def _plain(self, dice: Any, mode: str) -> Any:
        bands = len(Image.new(mode, (1, 1)).getbands())
        pixels = dice.integers(0, 256, (*SIZE[::-1], bands), np.uint8)
        return Image.merge(mode, [Image.fromarray(pixels[..., at]) for at in range(bands)])

    @property
    def is_deep(self) -> bool:
        return self.form in ("I;16", "F", "I")


@dataclass(frozen=True)
class ImageCase:
    layout: str
    pictures: tuple[Picture, ...]
    masks: tuple[tuple[str, int], ...] = ()
    """(path, bits per pixel) of a mask for each picture."""
    junk: tuple[str, ...] = ()
    container: str = ""
    """Suffix of an archive, or nothing for a folder."""
    top: str = ""
    """Folder of the archive that has all others."""
    bad_member: str = ""
    """Kind of a member that an archive must not have."""
    doubles: bool = False
    """Whether the archive has its first member twice, the first time another image."""

    # What is written.

    def files(self) -> list[tuple[str, bytes]]:
        files = [(one.path, one.content()) for one in self.pictures]
        files += [(path, mask_content(path, bits)) for path, bits in self.masks]
        return files + [(path, b"junk") for path in self.junk]

    def write(self, folder: Path) -> Path:
        if not self.container:
            for name, content in self.files():
                path = folder / "set" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return folder / "set"
        path = folder / f"set{self.container}"
        members = [(str(PurePosixPath(self.top, name)), data) for name, data in self.files()]
        if self.doubles:
            other = Picture(self.pictures[0].path, "RGB", self.pictures[0].seed + 1)
            members.insert(0, (members[0][0], other.content()))
        if self.container == ".zip":
            self._write_zip(path, members)
        else:
            self._write_tar(path, members)
        return path

    def _write_zip(self, path: Path, members: list[tuple[str, bytes]]) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members:
                archive.writestr(zipfile.ZipInfo(name), data)
            if self.bad_member:
                info = zipfile.ZipInfo(BAD_MEMBERS.get(self.bad_member, "a/link.png"))
                if self.bad_member == "link":
                    info.external_attr = 0o120777 << 16
                archive.writestr(info, b"../../etc/passwd")

    def _write_tar(self, path: Path, members: list[tuple[str, bytes]]) -> None:
        with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as archive:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            if self.bad_member:
                info = tarfile.TarInfo(BAD_MEMBERS.get(self.bad_member, "a/link.png"))
                if self.bad_member == "link":
                    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                archive.addfile(info, io.BytesIO(b""))

    # What it holds.

    def role(self, path: str) -> str:
        parts = {part.lower() for part in PurePosixPath(path).parts[:-1]}
        if self.layout not in ("splits", "splits below"):
            return "train"
        return next((one for one in ("val", "test") if one in parts), "train")

    def label(self, path: str) -> str:
        folders = PurePosixPath(path).parts[:-1]
        return next(name for name in folders if name not in ("train", "val", "test"))

    def refusals(self) -> list[Refusal]:
        found = []
        if self.bad_member:
            leads = "is a link" if self.bad_member == "link" else "out of the archive"
            return [Refusal(leads)]
        used = [one for one in self.pictures if self.role(one.path) != "test"]
        sound = [one for one in used if not one.fault]
        for one in used:
            name = PurePosixPath(one.path).name
            if one.fault:
                found.append(Refusal(name, "image"))
            if one.is_deep:
                found.append(Refusal(name, "mode"))
                found.append(Refusal(name, "16 bits"))
            elif one.form == "frames":
                found.append(Refusal(name, "pages or frames"))
            elif not one.fault and _upright(one).size != _upright(sound[0]).size:
                found.append(Refusal("pixels (height x width)"))
        if self.layout == "one":
            found.append(Refusal("one class only"))
        if self.layout == "loose":
            found.append(Refusal("is in no folder of its class"))
            if self.top:  # which is not left out then, and so is the class of all
                found.append(Refusal("one class only", self.top))
        if self.layout == "mixed":
            is_one = len({PurePosixPath(one.path).parts[0] for one in self.pictures}) == 1
            found.append(Refusal("one class only" if is_one else "named like a division"))
        if self.layout == "masks":
            deep = [path for path, bits in self.masks if bits == 16]
            found += [Refusal(PurePosixPath(path).name, "mode I;16") for path in deep]
        return found

    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        data = Data(source=self.write(folder).as_uri(), format="images")
        read = open_masked_images if self.layout == "masks" else open_images
        found, fault = outcome(lambda: read(data, policy), self.refusals())
        if found is None:
            return fault
        used = [one for one in self.pictures if self.role(one.path) != "test"]
        used.sort(key=lambda one: one.path)
        return self._differs(found, used)

    def _differs(self, found: Any, used: list[Picture]) -> str | None:
        is_grey = all(one.form in ("1", "L", "LA") for one in used)
        if len(found.pixels) != len(used):
            return f"{len(found.pixels)} images, expected {len(used)}"
        if found.num_left_out != len(self.pictures) - len(used):
            return f"{found.num_left_out} are left out"
        for at, one in enumerate(used):
            expected = _on_white(_upright(one), grey=is_grey)
            off = np.abs(found.pixels[at].astype(int) - expected).max()
            if off > (1 if "A" in one.form else 0):
                return f"{one.path} ({one.form}): a pixel is off by {off}"
            if self.layout == "masks":
                bits = dict(self.masks)[f"masks/{PurePosixPath(one.path).stem}.png"]
                if not np.array_equal(found.masks[at], mask_pixels(bits)):
                    return f"the mask of {one.path} ({bits} bits) is {found.masks[at].tolist()}"
            elif found.classes[found.labels[at]] != self.label(one.path):
                return f"{one.path} is {found.classes[found.labels[at]]}"
            elif (self.role(one.path) == "val") != bool(
                found.is_validation is not None and found.is_validation[at]
            ):
                return f"{one.path} is in the wrong part"
        return None

    def smaller(self) -> Iterator[Self]:
        if self.container and not self.bad_member:
            yield replace(self, container="", top="", doubles=False)
        for at in range(len(self.junk)):
            yield replace(self, junk=without(self.junk, at))
        for at in range(len(self.pictures) if len(self.pictures) > 2 and not self.masks else 0):
            yield replace(self, pictures=without(self.pictures, at))


BAD_MEMBERS = {"above": "../a/x.png", "absolute": "/a/x.png", "backslash": "a\\x.png"}


def mask_pixels(bits: int) -> Any:
    """Every class that fits, up to 16 of them, in the upper rows."""
    dice = np.random.default_rng(bits)
    pixels = dice.integers(0, min(2**bits, 16), SIZE[::-1], np.uint8)
    pixels[0, :2] = (0, 1)
    return pixels


def mask_content(path: str, bits: int) -> bytes:
    data = io.BytesIO()
    pixels = mask_pixels(bits)
    options = {}
    match bits:
        case 1:
            image = Image.fromarray(pixels * 255).convert("1")
        case 2 | 4:
            image = Image.fromarray(pixels, "P")
            image.putpalette([at // 3 for at in range(3 * 2**bits)])
            options["bits"] = bits
        case 16:
            image = Image.fromarray(pixels.astype(np.uint16))
        case _:
            image = Image.fromarray(pixels)
    image.save(data, "PNG", **options)
    return data.getvalue()


def _upright(one: Picture) -> Any:
    with Image.open(io.BytesIO(one.content())) as image:
        image.load()
        return ImageOps.exif_transpose(image)


def _on_white(image: Any, *, grey: bool) -> Any:
    """(channels, height, width) of whole numbers: each pixel over white by its alpha."""
    rgba = np.asarray(image.convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    shown = np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(int)
    if not image.has_transparency_data:
        shown = np.asarray(image.convert("RGB")).astype(int)
    return shown[..., 0][None] if grey else shown.transpose(2, 0, 1)


def draw(seed: int) -> ImageCase:
    dice = random.Random(f"images {seed}")
    layout = dice.choice(LAYOUTS)
    pictures = []
    suffixes = dice.sample(list(FORMS), dice.randint(1, 3))
    labels = dice.sample(("a", "b", "Cats", "dögs", "with space", "0"), dice.randint(2, 4))
    odd = dice.random() < 0.15
    for number in range(dice.randint(4, 10)):
        suffix = dice.choice(suffixes)
        plain = [f for f in FORMS[suffix] if f not in ("I;16", "F", "I", "frames", "RGB+o")]
        form = dice.choice(FORMS[suffix] if odd else plain)
        if layout == "masks" and dice.random() < 0.8:
            form = plain[-1]
        name = f"{number}.{suffix}"
        if dice.random() < 0.1:
            name = name.upper()
        if suffix in ("jpg", "tif") and dice.random() < 0.1:
            name = name.lower().replace("jpg", "jpeg").replace(".tif", ".tiff")
        label = labels[number % len(labels)]
        part = ("train", "val", "test")[number // len(labels) % 3]
        path = {
            "classes": f"{label}/{name}",
            "splits": f"{part}/{label}/{name}",
            "splits below": f"{label}/{part}/{name}",
            "masks": f"images/{name}",
            "one": f"{labels[0]}/{name}",
            "loose": f"{label}/{name}" if number else name,
            "mixed": f"{part}/{name}" if number < 2 * len(labels) else f"{label}/{name}",
        }[layout]
        fault = dice.choice(BROKEN) if dice.random() < 0.01 else ""
        pictures.append(Picture(path, form, 1000 * seed + number, fault))
    case = ImageCase(layout, tuple(pictures))
    if layout == "masks":
        bits = dice.choice((1, 2, 4, 8, 8, 16))
        masks = [(f"masks/{PurePosixPath(one.path).stem}.png", bits) for one in case.pictures]
        case = replace(case, masks=tuple(masks))
    container = dice.choice(("", "", ".zip", ".tar", ".tar.gz"))
    junk = tuple(dice.sample(JUNK, dice.choice((0, 0, 1, 3))))
    case = replace(case, junk=junk, container=container)
    if container:
        bad = dice.choice((*BAD_MEMBERS, "link")) if dice.random() < 0.1 else ""
        top = dice.choice(("", "my set"))
        doubles = dice.random() < 0.1 and not case.pictures[0].fault
        case = replace(case, top=top, bad_member=bad, doubles=doubles)
    return case
