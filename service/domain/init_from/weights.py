"""Whether a model can start with the weights of another job's model, judged by the two documents.

The tensors of both models must have the same names, shapes and meaning. Sizes that can be
determined only from the data (columns of a file, classes of a folder, tokens of a tokenizer) are
checked later, by the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from dray.spec import Cnn, Gpt, JobSpec, Lora, Mlp, Reward
from service.domain.init_from.continuing import Difference

_HALVINGS_OF_CNN: Final = 2
"""The input of a `cnn`'s last layer has a quarter of the image's height and a quarter of its
width."""
_SIZE_OF_DIGITS: Final = (8, 8)
SKLEARN: dict[str, tuple[int, int]] = {
    "breast_cancer": (30, 2),
    "diabetes": (10, 1),
    "digits": (64, 10),
    "iris": (4, 3),
    "wine": (13, 3),
}
"""(columns, classes)."""


@dataclass(frozen=True)
class _Size:
    """A field as written in the document, and the sizes on which the shapes of weights depend."""

    words: str = field(compare=False)
    counts: Any

    def __str__(self) -> str:
        return self.words


def difference(source: JobSpec, spec: JobSpec) -> Difference | None:
    """Return the first difference that prevents `spec` from starting with the weights of `source`.

    A rule is skipped if one of the documents has no value for it.
    """
    if source.recipe is None:
        return Difference(
            "/init_from/job",
            "is a job that ran a script, and recipes can't read the weights of scripts",
        )
    for pointer, value_of, why in _RULES:
        theirs, ours = value_of(source), value_of(spec)
        if None not in (theirs, ours) and theirs != ours:
            location = pointer if isinstance(pointer, str) else pointer(spec)
            return Difference(location, f"is {ours}, but was {theirs}: {why}")
    return None


def _of_model(name: str) -> Callable[[JobSpec], Any]:
    return lambda spec: getattr(spec.model, name, None)


def _adapter(spec: JobSpec) -> str | None:
    """Return what determines the names and shapes of an adapter's weights, except for the base."""
    if spec.recipe != "fine_tuning":
        return None
    adapter = getattr(spec.model, "adapter", None)
    if not isinstance(adapter, Lora):
        return "unset"
    targets = adapter.target_modules
    names = targets if isinstance(targets, str) else f"[{', '.join(sorted(targets))}]"
    kind = {"lora": "LoRA", "dora": "DoRA"}[adapter.kind]
    return f"a {kind} of rank {adapter.rank} for {names}"


def _last_layer(spec: JobSpec) -> str | None:
    """Return the fine-tuning method if its model has a different last layer from the base."""
    if spec.method is None:
        return None
    return spec.method.name if isinstance(spec.method, Reward) else "sft or dpo"


def _tokenizer(spec: JobSpec) -> str | None:
    """Return only whether a tokenizer is set, because the same tokenizer can be at two paths."""
    if not isinstance(spec.model, Gpt):
        return None
    return "unset" if spec.model.tokenizer is None else "a tokenizer"


def _sklearn(spec: JobSpec) -> tuple[int, int] | None:
    """Return (columns, classes) of a scikit-learn data set."""
    return SKLEARN[PurePosixPath(spec.data.source).name] if spec.data.scheme == "sklearn" else None


def _columns(spec: JobSpec) -> _Size | None:
    if spec.recipe not in ("tabular_classification", "tabular_regression"):
        return None
    count = None
    if (known := _sklearn(spec)) is not None:
        count = known[0]
    elif spec.data.features is not None and spec.data.known_format != "npz":
        count = len(spec.data.features)
    return None if count is None else _Size(f"{count} columns", count)


def _image(spec: JobSpec) -> _Size | None:
    """Return height and width if a layer of the model has a weight for each pixel."""
    size = _SIZE_OF_DIGITS if spec.data.scheme == "sklearn" else spec.data.image_size
    if size is None or spec.recipe != "image_classification":
        return None
    height, width = size
    words = f"{height} x {width} pixels"
    if isinstance(spec.model, Cnn):
        return _Size(words, (height >> _HALVINGS_OF_CNN, width >> _HALVINGS_OF_CNN))
    return _Size(words, (height, width)) if isinstance(spec.model, Mlp) else None


def _classes(spec: JobSpec) -> _Size | None:
    count = None
    if spec.data.classes is not None:
        count = len(spec.data.classes)
    elif spec.recipe != "tabular_regression" and (known := _sklearn(spec)) is not None:
        count = known[1]
    return None if count is None else _Size(f"{count} classes", count)


def _given(option: str) -> Callable[[JobSpec], str]:
    """Return a function that returns a pointer to the field that determines the size: the data
    field `option` if it is set, otherwise the source."""
    return lambda spec: f"/data/{option if getattr(spec.data, option) else 'source'}"


_SHAPE: Final = "the weights have a different shape"
_RULES: Final[tuple[tuple[str | Callable[[JobSpec], str], Callable[[JobSpec], Any], str], ...]] = (
    ("/recipe", lambda spec: spec.recipe, "the model is different"),
    ("/model/name", _of_model("name"), "the weights were trained for the earlier model"),
    ("/model/width", _of_model("width"), _SHAPE),
    ("/model/depth", _of_model("depth"), "the layers are different"),
    ("/model/num_layers", _of_model("num_layers"), "the layers are different"),
    (
        "/model/num_heads",
        _of_model("num_heads"),
        "the rows of the attention weights are divided among the heads",
    ),
    ("/model/tokenizer", _tokenizer, "the tokens are different"),
    ("/model/adapter", _adapter, "other weights are trained"),
    ("/method/name", _last_layer, "the last layer is different"),
    (_given("features"), _columns, _SHAPE),
    (_given("image_size"), _image, _SHAPE),
    (_given("classes"), _classes, "the last layer has one output per class"),
)
