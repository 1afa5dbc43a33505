"""The JSON Schema of a job document, for editors that complete and check by one.

It is what pydantic makes of the classes, made fit for people who type: bounds have their JSON
Schema names, a part may be begun in any order (`anyOf` where a tag would choose), and hovering
shows the field's sentence instead of its name again.
"""

from __future__ import annotations

from typing import Any

from dray.spec import JobSpec

_BOUNDS = {"gt": "exclusiveMinimum", "ge": "minimum", "lt": "exclusiveMaximum", "le": "maximum"}
"""pydantic leaves its own names where a validator stands before the bound."""


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
    """The same without what an editor has no use for. `names`: the keys are fields', not words of
    JSON Schema."""
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
