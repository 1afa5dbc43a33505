"""Images with classes: a folder of folders, an archive of such a folder, or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from dray import spec
from ray_workers.datasets.core.errors import broken, listed, shortened
from ray_workers.datasets.core.types import Images
from ray_workers.datasets.formats import folder_splits, image_decoding, npz
from ray_workers.datasets.formats.folder_splits import SplitFile, SplitName
from ray_workers.datasets.formats.prepared import ArrayWriter, Workshop, prepare
from ray_workers.shared.node_needs import DataPolicy


def open_images(data: spec.Data, policy: DataPolicy) -> Images:
    """Open images with classes. Raises DataError."""
    version = image_decoding.IMAGES_VERSION
    how: dict[str, Any] = {"kind": "images", "size": data.image_size, "version": version}
    suffixes: tuple[str, ...] | None = image_decoding.SUFFIXES
    if data.known_format == "npz":
        how = {"kind": "image arrays", "target": data.target, "features": data.features}
        suffixes = None

    def build(shop: Workshop) -> Mapping[str, Any]:
        if data.known_format == "npz":
            return {**npz.build_images(shop, data), "division": folder_splits.NONE}
        return _build(shop, data.image_size)

    prepared = prepare(data, policy, how, build, suffixes=suffixes)
    is_validation, num_left_out = folder_splits.read(prepared)
    return Images(
        pixels=prepared.array("pixels"),
        max_value=prepared.meta["max_value"],
        labels=np.array(prepared.array("labels")),
        classes=tuple(prepared.meta["classes"]),
        fingerprint=prepared.fingerprint,
        is_validation=is_validation,
        num_left_out=num_left_out,
    )


def _build(shop: Workshop, size: tuple[int, int] | None) -> Mapping[str, Any]:
    every = folder_splits.members(image_decoding.files_by_path(shop), shop.location)
    folder_splits.refuse_repeated(every, shop.location)
    samples = folder_splits.kept(every)
    for sample in samples:
        if len(sample.parts) < 2:
            raise broken(
                sample.file.location,
                "is not in a class folder: each class must have a folder with its images",
            )
    classes = tuple(
        sorted({_label(one) for one in samples if one.role is not SplitName.VALIDATION})
    )
    for sample in samples:
        if _label(sample) not in classes:
            raise broken(
                sample.file.location,
                f"is a validation image of the class {shortened(_label(sample))}, which has no "
                f"training images; the training classes are {listed(classes)}",
            )
    folder_splits.refuse_like_names(classes, shop.location)
    if len(classes) < 2:
        raise broken(
            shop.location,
            f"has only one class, the folder {shortened(classes[0])}, but needs two",
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
            labels.append(np.array([codes[_label(sample)]]))
    division = folder_splits.write(every, shop)
    return {"classes": classes, "max_value": image_decoding.WHITE, "division": division}


def _label(sample: SplitFile) -> str:
    """Return the class of an image, which is the first folder of its path."""
    return sample.parts[0]
