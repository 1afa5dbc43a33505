"""The JSON Schema of a job document, for editors that complete and check by one.

The schema is pydantic's, changed for use in editors: bounds have their JSON Schema names, the
fields of a part may be written in any order (`anyOf` instead of a tag), and hovering over a field
shows its description instead of its name.
"""

from __future__ import annotations

from typing import Any

from dray.spec import JobSpec

_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
"""Names of bounds, which pydantic leaves untranslated after a validator."""


def job_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of `dray.JobSpec`."""
    schema: dict[str, Any] = _tidied(JobSpec.model_json_schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "dray job document",
        "anyOf": [{"required": ["recipe"]}, {"required": ["script"]}],
    }


def _tidied(node: Any, *, names: bool = False) -> Any:
    """The schema without entries that editors don't need. names: whether the keys of `node` are
    names of fields, not words of JSON Schema."""
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
            word = "anyOf" if key == "oneOf" else _BOUNDS.get(str(key), str(key))
            found[word] = _tidied(value, names=key in ("properties", "$defs"))
    return found
