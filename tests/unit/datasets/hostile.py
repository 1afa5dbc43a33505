"""Small data sets of every format, and files damaged as by an attacker or a disk."""

from __future__ import annotations

import gzip
import io
import json
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from dray.spec import Data
from ray_workers import datasets
from ray_workers.shared.node_needs import DataPolicy

IMAGES = {f"{label}/{n}": n for label in "ab" for n in range(3)}
"""Path of each image within the set, and the image's content."""
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63, -1)

Open = Callable[[Data, DataPolicy], Any]


@dataclass(frozen=True)
class Format:
    """A valid file of a format, and its reader."""

    name: str
    """Content of the file."""
    content: bytes
    open: Open
    options: Mapping[str, Any]


def damaged(content: bytes, seed: int) -> bytes:
    """The file with one to eight faults, determined by the seed."""
    chance = random.Random(seed)
    found = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        if not found:
            break
        at = chance.randrange(len(found))
        match chance.randrange(6):
            case 0:
                found[at] ^= 1 << chance.randrange(8)
            case 1:
                form = chance.choice(["<H", ">H", "<I", ">I", "<Q", ">Q"])
                raw = struct.pack(form, chance.choice(EXTREMES) % 256 ** struct.calcsize(form))
                found[at : at + len(raw)] = raw
            case 2:
                del found[at:]
            case 3:
                del found[at : at + chance.randrange(1, 32)]
            case 4:
                found[at:at] = found[at : at + chance.randrange(1, 64)]
            case _:
                found[at : at + 4] = bytes(chance.randrange(256) for _ in range(4))
    return bytes(found)


def formats() -> dict[str, Format]:
    """One file of each format, by a readable name."""
    table = {"format": None, "target": "y"}
    return {
        "npz table": Format("t.npz", npz(x=ROWS, y=LABELS), _table, {}),
        "npz numbers": Format("t.npz", npz(x=ROWS, y=ROWS[:, 0]), _numbers, {}),
        "npz images": Format("t.npz", npz(x=PIXELS, y=LABELS), _images, {}),
        "npz masks": Format("t.npz", npz(x=PIXELS, y=PIXELS % 3), _masks, {}),
        "csv": Format("t.csv", CSV.encode(), _table, table),
        "csv.gz": Format("t.csv.gz", gzip.compress(CSV.encode(), mtime=0), _table, table),
        "parquet": Format("t.parquet", _parquet("snappy"), _table, table),
        "parquet plain": Format("t.parquet", _parquet("none"), _numbers, {**table, "target": "a"}),
        "zip": Format("t.zip", zipped(_drawn("png")), _images, {}),
        "zip of masks": Format("t.zip", zipped(_masked()), _masks, {}),
        "tar": Format("t.tar", tarred(_drawn("ppm"), "w"), _images, {}),
        "tar.gz": Format("t.tar.gz", tarred(_drawn("png"), "w:gz"), _images, {"format": "images"}),
        "tar.xz": Format("t.tar.xz", tarred(_drawn("png"), "w:xz"), _images, {"format": "images"}),
        "text": Format("t.txt", TEXT.encode(), _text, {}),
        "text.gz": Format("t.txt.gz", gzip.compress(TEXT.encode(), mtime=0), _text, {}),
    }


ROWS = np.arange(24, dtype=np.float32).reshape(12, 2)
LABELS = np.arange(12) % 2
PIXELS = (np.arange(12 * 64, dtype=np.uint8) % 200).reshape(12, 8, 8)
CSV = "a,b,y\n" + "".join(f"{n},{'xyz'[n % 3]},{['no', 'yes'][n % 2]}\n" for n in range(12))
TEXT = "Ein Öchslein zieht den Karren.\n" * 8


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npz_with_header(header: str, data: bytes = b"\0" * 96) -> bytes:
    """An archive whose array `x` has this header, valid or not."""
    padded = header.encode("latin-1")
    padded += b" " * (-(len(padded) + 11) % 64) + b"\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + data
    labels = io.BytesIO()
    np.save(labels, LABELS)
    return zipped({"x.npy": array, "y.npy": labels.getvalue()})


def zipped(files: Mapping[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


def tarred(files: Mapping[str, bytes], mode: Any) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def picture(kind: str, number: int = 0) -> bytes:
    """An image file in Pillow's format with that suffix."""
    file = io.BytesIO()
    image = Image.fromarray(PIXELS[number])
    image.save(file, {"jpg": "jpeg", "tif": "tiff"}.get(kind, kind))
    return file.getvalue()


def _drawn(kind: str) -> dict[str, bytes]:
    return {f"{path}.{kind}": picture(kind, number) for path, number in IMAGES.items()}


def _masked() -> dict[str, bytes]:
    found = {}
    for number in range(3):
        found[f"images/{number}.png"] = picture("png", number)
        mask = io.BytesIO()
        Image.fromarray(PIXELS[number] % 3).save(mask, "png")
        found[f"masks/{number}.png"] = mask.getvalue()
    return found


def _parquet(compression: str) -> bytes:
    file = io.BytesIO()
    columns = {"a": range(12), "b": [*"xyz"] * 4, "y": ["no", "yes"] * 6}
    parquet.write_table(pa.table(columns), file, compression=compression)
    return file.getvalue()


def tokenizer() -> bytes:
    words = {"?": 0, "Ein": 1, "Öchslein": 2, "zieht": 3, "den": 4, "Karren": 5}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "?"}
    document = {"version": "1.0", "added_tokens": [], "model": model}
    return json.dumps(document | {"pre_tokenizer": {"type": "Whitespace"}}).encode()


def _table(data: Data, policy: DataPolicy) -> Any:
    return datasets.open_table(data, policy, classifies=True)


def _numbers(data: Data, policy: DataPolicy) -> Any:
    return datasets.open_table(data, policy, classifies=False)


def _images(data: Data, policy: DataPolicy) -> Any:
    return datasets.open_images(data, policy)


def _masks(data: Data, policy: DataPolicy) -> Any:
    return datasets.open_masked_images(data, policy)


def _text(data: Data, policy: DataPolicy) -> Any:
    return datasets.open_text(data, policy, None)
