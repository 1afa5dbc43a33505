"""The fields of a job document, those that a document sets, and the places that read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from dray.spec import JobSpec

ROOT = Path(__file__).resolve().parents[3]
CODE = ("api", "dray", "ray_workers", "service")
CHECKS = ("dray/spec", "dray/cli", "dray/input")
"""What is read here alone has no effect on a job: it is checked, or shown."""


def classes() -> list[type[BaseModel]]:
    """The class of each part of a document."""
    found: list[type[BaseModel]] = [JobSpec]
    for model in found:
        for field in model.model_fields.values():
            found += [one for one in _models_in(field.annotation) if one not in found]
    return found


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def all_fields() -> dict[str, str]:
    """The attribute of each field by `Class.field`, but of those that have one value alone."""
    return {
        f"{model.__name__}.{name}": name
        for model in classes()
        for name, field in model.model_fields.items()
        if not (get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1)
    }


def set_fields(part: Any) -> Iterator[str]:
    """`Class.field` of each field that a document gives."""
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


def read_names() -> set[str]:
    """Names that the program reads, outside of the checks of documents, or in a function of theirs
    whose name is read so."""
    read: set[str] = set()
    inside: dict[str, set[str]] = {}
    for folder in CODE:
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            if not str(path.relative_to(ROOT)).startswith(CHECKS):
                read |= _names_in(tree)
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    inside.setdefault(node.name, set()).update(_names_in(node))
    while reached := {name for name in inside if name in read}:
        for name in reached:
            read |= inside.pop(name)
    return read


def _names_in(tree: ast.AST) -> set[str]:
    """Attributes and functions that are read, and keys of mappings."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()) | ast.Name(id=name, ctx=ast.Load()):
                found.add(name)
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                found.add(name)
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
                found.add(name)
    return found
