"""Open data sets by URL, as arrays that can be larger than memory.

The files of a source are downloaded once per node, validated, and converted to plain numpy files,
which all ranks of the node memory-map. Therefore any sample can be read directly by its index, and
samples can be read in any order.

For errors that would recur in another attempt, all functions raise
`ray_workers.training.core.errors.DataError`. The message is one sentence that names the source, the
file, the line or sample, and the error.
"""

from __future__ import annotations

from dray import spec
from ray_workers.datasets.core.types import Images, MaskedImages, Table, Tokens
from ray_workers.datasets.formats import images, masks, tables, text, toy_datasets
from ray_workers.shared.node_needs import DataPolicy

__all__ = [
    "Images",
    "MaskedImages",
    "Table",
    "Tokens",
    "open_images",
    "open_masked_images",
    "open_table",
    "open_text",
    "preload",
]


def open_images(data: spec.Data, policy: DataPolicy) -> Images:
    """Open a data set of format `images` or `npz`, or one of scikit-learn's image data sets."""
    if data.scheme == "sklearn":
        return toy_datasets.images(toy_datasets.name_of(data))
    return images.open_images(data, policy)


def open_masked_images(data: spec.Data, policy: DataPolicy) -> MaskedImages:
    """Open a data set of images with masks, in `images` or `npz` format."""
    return masks.open_masked_images(data, policy)


def open_table(data: spec.Data, policy: DataPolicy, *, classifies: bool) -> Table:
    """Open a data set of format `csv`, `parquet` or `npz`, or one of scikit-learn's tables."""
    if data.scheme == "sklearn":
        return toy_datasets.table(toy_datasets.name_of(data), classifies=classifies)
    return tables.open_table(data, policy, classifies=classifies)


def open_text(data: spec.Data, policy: DataPolicy, tokenizer: str | None) -> Tokens:
    """Open a data set of format `text`. tokenizer: URL of a `tokenizer.json`; None for bytes."""
    return text.open_text(data, policy, tokenizer)


def preload() -> None:
    """Load the data that the forkserver shares with its ranks. Does not start threads."""
    toy_datasets.images("digits")
