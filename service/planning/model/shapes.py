"""The shapes of a job's samples, to the extent that the document determines them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dray.spec import Gpt, Imported, JobSpec, ParameterServer, Pretrained, Sft
from service.domain.init_from.weights import SKLEARN
from service.planning.model.base_shapes import BaseShape, base_shape
from service.planning.model.unknown import Unknown

BYTES = 256
CLASSES = 10


@dataclass(frozen=True)
class Shapes:
    vocabulary: int | None = None
    image: tuple[int, int, int] | None = None
    """(channels, height, width)"""
    columns: int | None = None
    outputs: int = CLASSES
    base: BaseShape | None = None
    length: int | None = None
    """Number of tokens of a base model's rows; None for `method.max_length`."""
    assumed: tuple[str, ...] = ()
    """Assumptions about sizes that only the data determines, as sentences."""


def shapes_of(
    spec: JobSpec, vocabulary: int | None = None, config: Mapping[str, Any] | None = None
) -> Shapes:
    """Return the shapes of a job's samples.

    Raises Unknown for scripts, for jobs that the planner can't model, and if a necessary size is
    only known from the data. `vocabulary` is the size of the tokenizer's vocabulary, and `config`
    is the base's `config.json`, if known.
    """
    if spec.script is not None:
        raise Unknown("a script defines its own model, which is unknown before the script runs")
    if spec.federated is not None:
        raise Unknown(
            "the job is federated: each rank has the complete model, and nothing is divided. "
            "Remove `federated` to plan for the job's model"
        )
    if isinstance(spec.sync, ParameterServer):
        raise Unknown(
            "the planner can't estimate the memory and the step time of parameter servers. Omit "
            "`sync` to plan the job with all-reduce"
        )
    if isinstance(spec.model, Imported):
        raise Unknown("a custom model is unknown before the job runs")
    if isinstance(spec.model, Pretrained):
        return _of_base(spec, spec.model, config)
    if isinstance(spec.model, Gpt):
        return _of_text(spec.model, vocabulary)
    source, data = spec.data.source, spec.data
    known = SKLEARN.get(source.removeprefix("sklearn://").rstrip("/"))
    if spec.recipe in ("image_classification", "image_segmentation"):
        if known is not None:
            return Shapes(image=(1, 8, 8), outputs=known[1])
        if data.image_size is None:
            raise Unknown("the size of the images is unknown: set data.image_size")
        assumed = ["images have 3 channels"]
        outputs = CLASSES
        if data.classes is not None:
            outputs = len(data.classes)
        else:
            assumed.append(f"there are {CLASSES} classes")
        return Shapes(image=(3, *data.image_size), outputs=outputs, assumed=tuple(assumed))
    classes = 1 if spec.recipe == "tabular_regression" else CLASSES
    if known is not None:
        return Shapes(columns=known[0], outputs=known[1] if classes > 1 else 1)
    if data.features is None or spec.data.known_format == "npz":
        raise Unknown("the number of columns is unknown: set data.features")
    assumed = ["all columns are numbers"]
    if classes > 1:
        assumed.append(f"there are {CLASSES} classes")
    return Shapes(columns=len(data.features), outputs=classes, assumed=tuple(assumed))


def _of_base(spec: JobSpec, model: Pretrained, config: Mapping[str, Any] | None) -> Shapes:
    assert spec.method is not None
    if model.adapter is not None and model.adapter.base_precision == "nf4":
        raise Unknown("the planner can't estimate the memory of a base held in nf4")
    if config is None:
        raise Unknown(
            f"the server can't read config.json in {model.base}, which determines the sizes of the "
            "base. The server reads regular files, but not links, and only in folders on its own "
            "machine (file://) that jobs may read"
        )
    rows = "row has" if isinstance(spec.method, Sft) else "answer, together with its prompt, has"
    assumed = f"every {rows} {spec.method.max_length:,} tokens (method.max_length)"
    return Shapes(base=base_shape(config), assumed=(assumed,))


def _of_text(model: Gpt, vocabulary: int | None) -> Shapes:
    if vocabulary is not None or model.tokenizer is None:
        return Shapes(vocabulary=vocabulary or BYTES)
    size = 50_304
    return Shapes(vocabulary=size, assumed=(f"the tokenizer has {size:,} tokens",))
