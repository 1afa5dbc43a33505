"""The fields of a job document, and the fields that a document sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from dray.spec import JobSpec


def classes() -> list[type[BaseModel]]:
    """Return the class of each part of a document."""
    found: list[type[BaseModel]] = [JobSpec]
    for model in found:
        for field in model.model_fields.values():
            found += [one for one in models_in(field.annotation) if one not in found]
    return found


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def all_fields() -> set[str]:
    """Return `Class.field` for each field."""
    return {f"{model.__name__}.{name}" for model in classes() for name in model.model_fields}


def set_fields(part: Any) -> Iterator[str]:
    """Return `Class.field` for each field that a document sets."""
    if isinstance(part, BaseModel):
        for name in part.model_fields_set:
            yield f"{type(part).__name__}.{name}"
            yield from set_fields(getattr(part, name))
    elif isinstance(part, dict):
        for inner in part.values():
            yield from set_fields(inner)
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from set_fields(inner)
