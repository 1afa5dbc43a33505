"""Images by class: a folder of folders, an archive of one, or arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from dray import spec
from ray_workers.datasets.core.errors import broken, shortened
from ray_workers.datasets.core.types import Images
from ray_workers.datasets.formats import image_decoding, npz
from ray_workers.datasets.formats.prepared import ArrayWriter, Workshop, prepare
from ray_workers.datasets.sources.source import SourceFile
from ray_workers.shared.node_needs import DataPolicy


@dataclass(frozen=True)
class _Sample:
    label: str
    file: SourceFile


def open_images(data: spec.Data, policy: DataPolicy) -> Images:
    """Raises DataError."""
    version = image_decoding.IMAGES_VERSION
    how: dict[str, Any] = {"kind": "images", "size": data.image_size, "version": version}
    suffixes: tuple[str, ...] | None = image_decoding.SUFFIXES
    if data.known_format == "npz":
        how = {"kind": "image arrays", "target": data.target, "features": data.features}
        suffixes = None

    def build(shop: Workshop) -> Mapping[str, Any]:
        if data.known_format == "npz":
            return npz.build_images(shop, data)
        return _build(shop, data.image_size)

    prepared = prepare(data, policy, how, build, suffixes=suffixes)
    return Images(
        pixels=prepared.array("pixels"),
        max_value=prepared.meta["max_value"],
        labels=np.array(prepared.array("labels")),
        classes=tuple(prepared.meta["classes"]),
        fingerprint=prepared.fingerprint,
    )


def _build(shop: Workshop, size: tuple[int, int] | None) -> Mapping[str, Any]:
    samples = list(_samples(shop))
    classes = tuple(sorted({sample.label for sample in samples}))
    if len(classes) < 2:
        raise broken(
            shop.place, f"has one class only, the folder {shortened(classes[0])}; it takes two"
        )
    height, width, channels = image_decoding.common_form([sample.file for sample in samples], size)
    codes = {label: code for code, label in enumerate(classes)}
    with ExitStack() as files:
        pixels = files.enter_context(
            ArrayWriter(shop.output, "pixels", (channels, height, width), np.uint8, shop.budget)
        )
        labels = files.enter_context(ArrayWriter(shop.output, "labels", (), np.int64, shop.budget))
        for sample in samples:
            pixels.append(image_decoding.decoded(sample.file, height, width, channels)[None])
            labels.append(np.array([codes[sample.label]]))
    return {"classes": classes, "max_value": image_decoding.WHITE}


def _samples(shop: Workshop) -> Iterator[_Sample]:
    """Every image with its class: the first folder of its path. In the order of the paths."""
    for file, parts in image_decoding.files_by_path(shop):
        if len(parts) < 2:
            raise broken(
                file.place,
                "is in no folder of its class: each class has a folder with its images",
            )
        yield _Sample(parts[0], file)
