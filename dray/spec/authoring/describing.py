"""Descriptions of the fields of a job document, and its JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dray.spec import JobSpec
from dray.spec.fields import TAG_FIELDS

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class FieldText:
    name: str
    takes: str
    """The allowed values, for example `integer, 1 to 4096`."""
    default: str
    """The default value, as written in a document. Empty if the field has no default."""
    sentence: str


@dataclass(frozen=True)
class Part:
    """One object of the document, such as `train.optimizer`."""

    path: str
    """Dotted path of the part; empty for the document itself."""
    variant: str | None
    """The `name` or `kind` that selects this part of `model` or `sync`. None for all other
    parts."""
    sentence: str
    fields: tuple[FieldText, ...]

    def field(self, name: str) -> FieldText:
        return next(field for field in self.fields if field.name == name)


def parts() -> list[Part]:
    """Return all parts of the document, each before the parts that it contains."""
    schema = job_schema()
    return list(_parts("", schema, schema["$defs"], is_variant=False))


def _parts(path: str, node: Schema, defs: Schema, *, is_variant: bool) -> Iterator[Part]:
    properties: Schema = node["properties"]
    required = set(node.get("required", ()))
    variant = _variant(properties) if is_variant else None
    fields = tuple(
        FieldText(
            name,
            _takes(one, defs),
            "" if name in required else _default(one),
            one.get("description") or _of_objects(one, defs),
        )
        for name, one in properties.items()
    )
    yield Part(path, variant, node.get("description", ""), fields)
    for name, one in properties.items():
        objects = list(_objects(one, defs))
        for inner in objects:
            below = f"{path}.{name}" if path else name
            yield from _parts(below, inner, defs, is_variant=len(objects) > 1)


def _variant(properties: Schema) -> str:
    tag = next(name for name in TAG_FIELDS if name in properties)
    return str(properties[tag]["const"])


def _objects(node: Schema, defs: Schema) -> Iterator[Schema]:
    """Yield the object types that are allowed for a field, or for the items of its list or
    mapping."""
    if "$ref" in node:
        target: Schema = defs[node["$ref"].rpartition("/")[2]]
        if "properties" in target:
            yield target
    if "items" in node:
        yield from _objects(node["items"], defs)
    for named in (*node.get("patternProperties", {}).values(), node.get("additionalProperties")):
        if isinstance(named, Mapping):
            yield from _objects(named, defs)
    for option in node.get("anyOf", ()):
        yield from _objects(option, defs)


def _of_objects(node: Schema, defs: Schema) -> str:
    """Return the description of a field's object type, for fields without their own description."""
    sentences = [str(inner.get("description", "")) for inner in _objects(node, defs)]
    return sentences[0] if len(sentences) == 1 else ""


def _default(node: Schema) -> str:
    value = node.get("default")
    return "" if value is None or value == {} else f"`{json.dumps(value, ensure_ascii=False)}`"


def _takes(node: Schema, defs: Schema) -> str:
    if "anyOf" in node:
        options = [option for option in node["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(_takes(option, defs) for option in options))
    if "$ref" in node:
        return "object"
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{choice}`" for choice in node["enum"])
    match node.get("type"):
        case "array":
            return _list_takes(node, defs)
        case "object":
            return "names with values" if "additionalProperties" not in node else "object"
        case "boolean":
            return "`true`, `false`"
        case "string":
            examples = node.get("examples")
            return f"text such as `{examples[0]}`" if examples else "text"
        case kind:
            return f"{kind}{_range(node)}"


def _list_takes(node: Schema, defs: Schema) -> str:
    if "prefixItems" in node:
        return " and ".join(_takes(item, defs) for item in node["prefixItems"])
    items = node.get("items", {})
    return f"list of: {_takes(items, defs)}"


def _range(node: Schema) -> str:
    """Return the range of a number, such as `, 1 to 4096`."""
    parts = []
    if "minimum" in node and "maximum" in node:
        return f", {_number(node['minimum'])} to {_number(node['maximum'])}"
    for word, sign in (
        ("exclusiveMinimum", "above"),
        ("minimum", "at least"),
        ("exclusiveMaximum", "below"),
        ("maximum", "at most"),
    ):
        if word in node:
            parts.append(f"{sign} {_number(node[word])}")
    return ", " + ", ".join(parts) if parts else ""


def _number(value: float) -> str:
    whole = int(value)
    if whole != value:
        return f"{value:g}"
    for base in (2, 10):
        power = len(bin(whole)) - 3 if base == 2 else len(str(whole)) - 1
        if whole >= 100_000 and base**power in (whole, whole + 1):
            return f"{base}^{power}"
    return f"{whole:,}"


# pydantic's schema, modified for editors. With `anyOf` instead of a discriminator, the fields of a
# part can be written in any order. Without titles, editors show the description of a field instead
# of its name when the user hovers over it.


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `dray.JobSpec`."""
    schema: dict[str, Any] = _tidied(JobSpec.model_json_schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "dray job document",
        "anyOf": [{"required": ["recipe"]}, {"required": ["script"]}],
    }


def _tidied(node: Any, *, names: bool = False) -> Any:
    """Return the schema without entries that editors don't need. names: whether the keys of `node`
    are field names instead of JSON Schema keywords."""
    if isinstance(node, list):
        return [_tidied(item) for item in node]
    if not isinstance(node, dict):
        return node
    if names:
        return {key: _tidied(value) for key, value in node.items()}
    found: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("title", "discriminator") or (key == "default" and isinstance(value, dict)):
            continue
        if key == "description":
            found[key] = " ".join(value.split())
        elif key in ("default", "const", "enum", "examples"):
            found[key] = value
        else:
            found["anyOf" if key == "oneOf" else key] = _tidied(
                value, names=key in ("properties", "$defs")
            )
    return found
