"""Templates of job documents for each recipe and for a script, with a comment on each field."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dray.spec.authoring.describing import Part, parts
from dray.spec.program.recipes import RECIPES
from dray.spec.training.data import Data

KINDS: Final = (*RECIPES, "script")
_COLUMNS = 96


@dataclass(frozen=True)
class Off:
    """A field that is commented out, for users to enable."""

    value: Any


_SOURCES: Final[Mapping[str, Mapping[str, Any]]] = {
    "image_classification": {"source": "sklearn://digits"},
    "image_segmentation": {"source": "file:///path/to/folder", "image_size": Off([128, 128])},
    "tabular_classification": {"source": "sklearn://iris"},
    "tabular_regression": {"source": "sklearn://diabetes"},
    "language_model": {"source": "file:///path/to/text.txt"},
    "fine_tuning": {"source": "file:///path/to/examples.jsonl"},
}
_MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fine_tuning": {"base": "file:///path/to/model", "adapter": {"kind": "lora", "rank": 16}},
}
_METHODS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fine_tuning": {
        "method": {"name": "sft", "loss": "answers", "max_length": 1024, "packing": False}
    }
}


def starting_document(
    kind: str,
    *,
    schema: str,
    name: str = "script",
    entrypoint: str = "/path/to/train.py",
    code: str | None = None,
    everything: bool = False,
) -> str:
    """Return a valid document of `kind` (one of KINDS) as YAML.

    schema: URL or path of the JSON Schema, for editors. name, entrypoint, code: values for a
    script; `code` is the folder to upload. everything: if true, optional fields are not commented
    out.
    """
    fields = _script(name, entrypoint, code) if kind == "script" else _recipe(kind)
    known = {(part.path, part.variant): part for part in parts()}
    lines = [
        f"# yaml-language-server: $schema={schema}",
        f"# A job document for dray: {kind}.",
        "# `dray submit FILE --dry-run` checks the document, and `dray submit FILE` submits the "
        "job.",
        "",
        *_lines(fields, "", known, everything=everything),
    ]
    return "\n".join(lines) + "\n"


def _recipe(recipe: str) -> dict[str, Any]:
    options = RECIPES[recipe]
    return {
        "name": recipe.replace("_", "-"),
        "recipe": recipe,
        "model": {"name": options.models[0], **_MODELS.get(recipe, {})},
        **_METHODS.get(recipe, {}),
        "data": {**_SOURCES[recipe], "validation_fraction": Data().validation_fraction},
        "train": {
            "epochs": 10,
            "global_batch_size": 32,
            "optimizer": {"name": "adamw", "lr": 0.001, "weight_decay": 0.01},
            "schedule": {"name": "cosine", "warmup_steps": 20},
            "precision": "fp32",
            "max_grad_norm": Off(1.0),
            "early_stopping": Off({"metric": "val/loss", "patience": 3}),
            "seed": 0,
        },
        "resources": _resources(),
        "checkpoint": {"every_steps": Off(50), "keep": 3, "best": options.metrics[1]},
        "elastic": Off({"min_workers": 1}),
        **_queueing(),
    }


def _script(name: str, entrypoint: str, code: str | None) -> dict[str, Any]:
    program: dict[str, Any] = {"entrypoint": entrypoint, "args": []}
    return {
        "name": name,
        "script": program if code is None else {**program, "code": code},
        "resources": _resources(),
        **_queueing(),
    }


def _resources() -> dict[str, Any]:
    return {
        "num_workers": 1,
        "gpus_per_worker": 0,
        "cpus_per_worker": 1,
        "memory_bytes": Off("8GiB"),
    }


def _queueing() -> dict[str, Any]:
    return {
        "labels": Off({"team": "vision"}),
        "priority": Off(50),
        "max_retries": 1,
        "max_runtime_s": Off("2h"),
    }


def _lines(
    fields: Mapping[str, Any],
    path: str,
    known: Mapping[tuple[str, str | None], Part],
    *,
    everything: bool,
    off: bool = False,
) -> Iterator[str]:
    part = known.get((path, None)) or known.get((path, fields.get("name")))
    margin = "  " * (path.count(".") + 1 if path else 0)
    for name, given in fields.items():
        is_off = off or (isinstance(given, Off) and not everything)
        value = given.value if isinstance(given, Off) else given
        mark = f"{margin}# " if is_off else margin
        if part is not None and not off:
            yield from _comment(part, name, margin)
        below = f"{path}.{name}" if path else name
        is_part = isinstance(value, Mapping) and any(known_path == below for known_path, _ in known)
        if not is_part:
            yield f"{mark}{name}: {_scalar(value)}"
        elif is_off:
            yield f"{mark}{name}: {_flow(value)}"
        else:
            yield f"{margin}{name}:"
            yield from _lines(value, below, known, everything=everything)
        if not path:
            yield ""


def _flow(value: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {_scalar(one)}" for key, one in value.items()) + "}"


def _scalar(value: Any) -> str:
    """Return the value as YAML, with quotes only where YAML needs them."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./:-]*[\w/]|[0-9]+[A-Za-z]+", value):
        return value
    return json.dumps(value)


def _comment(part: Part, name: str, margin: str) -> Iterator[str]:
    """Yield comment lines that describe a field and its allowed values."""
    field = part.field(name)
    takes = "" if field.takes in ("object", "text", "names with values") else f" [{field.takes}]"
    text = f"{field.sentence}{takes}".strip().replace("`", "")
    for line in textwrap.wrap(text, _COLUMNS - len(margin), break_on_hyphens=False):
        yield f"{margin}# {line}"
