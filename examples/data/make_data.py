"""Write a small dataset in each format to a folder. They come from scikit-learn, except that the
images with masks are generated.

python examples/data/make_data.py data
"""

from __future__ import annotations

import csv
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import sklearn.datasets
from PIL import Image
from pyarrow import parquet


def write_wine(folder: Path) -> None:
    """Write a table with a header and a categorical target."""
    wine = sklearn.datasets.load_wine()
    with open(folder / "wine.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*wine.feature_names, "grower"])
        for values, grower in zip(wine.data, wine.target, strict=True):
            rows.writerow([*values, "ABC"[grower]])


def write_diabetes(folder: Path) -> None:
    """Write a table with column types, a numeric target and one categorical column."""
    diabetes = sklearn.datasets.load_diabetes()
    columns = dict(zip(diabetes.feature_names, diabetes.data.T, strict=True))
    columns["sex"] = np.where(columns["sex"] > 0, "f", "m")
    parquet.write_table(
        pa.table(columns | {"progression": diabetes.target}), folder / "diabetes.parquet"
    )


def write_digits(folder: Path) -> None:
    """Write images as arrays, as one folder per class, and as an archive of those folders."""
    digits = sklearn.datasets.load_digits()
    pixels = (digits.images / 16 * 255).astype(np.uint8)
    np.savez_compressed(folder / "digits.npz", x=pixels, y=digits.target)
    for number, (image, digit) in enumerate(zip(pixels[:600], digits.target[:600], strict=True)):
        path = folder / "digits" / str(digit) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(path)
    with zipfile.ZipFile(folder / "digits.zip", "w") as archive:
        for path in sorted((folder / "digits").rglob("*.png")):
            archive.write(path, path.relative_to(folder))


def write_cells(folder: Path) -> None:
    """Write images with masks: cells on a noisy background, each with a nucleus."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:48, :48]
    for kind in ("images", "masks"):
        (folder / "cells" / kind).mkdir(parents=True, exist_ok=True)
    for number in range(120):
        mask = np.zeros((48, 48), dtype=np.uint8)
        for row, column in rng.integers(8, 40, (3, 2)):
            distance = np.hypot(rows - row, columns - column)
            mask[(distance <= 7) & (mask == 0)] = 1
            mask[distance <= 3] = 2
        pixels = (60 * mask + rng.integers(0, 90, mask.shape)).astype(np.uint8)
        for kind, content in (("images", pixels), ("masks", mask)):
            Image.fromarray(content).save(folder / "cells" / kind / f"{number:03}.png")


def write_texts(folder: Path) -> None:
    """Write a folder of text files."""
    (folder / "texts").mkdir(exist_ok=True)
    for name in ("breast_cancer", "diabetes", "digits", "iris", "wine"):
        text = getattr(sklearn.datasets, f"load_{name}")().DESCR
        (folder / "texts" / f"{name}.txt").write_text(text)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for write in (write_wine, write_diabetes, write_digits, write_cells, write_texts):
        write(folder)
    print("wrote", ", ".join(sorted(path.name for path in folder.iterdir())))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
