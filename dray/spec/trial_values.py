"""The values of a trial's parameters, and how they are put into a job document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dray.arguments import MAX_CHARS

Value = Any
"""The value of a parameter in a trial: a boolean, null, a number, a string, or a list of these."""
Values = Mapping[str, Value]
"""Values of the parameters, keyed by name."""
PLACEHOLDER = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_-]*)\}")


def variable(name: str) -> str:
    """Return the name of the environment variable for the value of a parameter."""
    return f"DRAY_PARAM_{re.sub('[.-]', '_', name).upper()}"


def as_text(value: Value) -> str:
    """Return a value as text for an argument or a variable. Values of all types except strings are
    converted to JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def with_values(document: Mapping[str, Any], values: Values) -> dict[str, Any]:
    """Return a copy of a job document with these values in a recipe's fields, or in place of
    `${NAME}` in a script's arguments. Values that the script's arguments don't use are added to the
    script's `parameters`, so that comparisons include them."""
    script = document.get("script")
    if script is None:
        changed = dict(document)
        for name, value in values.items():
            changed = _with_field(changed, name.split("."), value)
        return changed
    script, roles = dict(script), dict(script.get("roles") or {})
    texts = [text for one in (script, *roles.values()) for text in one.get("args") or ()]
    used = {name for text in texts for name in PLACEHOLDER.findall(text)}
    own = {name: value for name, value in values.items() if name not in used and _is_plain(value)}
    if own:
        script["parameters"] = {**(script.get("parameters") or {}), **own}
    script = _with_arguments(script, values)
    if roles:
        script["roles"] = {name: _with_arguments(role, values) for name, role in roles.items()}
    return {**document, "script": script}


def _is_plain(value: Value) -> bool:
    """Whether the value can be one of a script's `parameters`."""
    return isinstance(value, bool | int | float) or (
        isinstance(value, str) and len(value) <= MAX_CHARS
    )


def _with_field(part: Any, names: list[str], value: Value) -> dict[str, Any]:
    fields = dict(part) if isinstance(part, Mapping) else {}
    first, *rest = names
    fields[first] = _with_field(fields.get(first), rest, value) if rest else value
    return fields


def _with_arguments(program: Mapping[str, Any], values: Values) -> dict[str, Any]:
    arguments = program.get("args")
    if not arguments:
        return dict(program)

    def filled(match: re.Match[str]) -> str:
        return as_text(values[match[1]]) if match[1] in values else match[0]

    return {**program, "args": [PLACEHOLDER.sub(filled, one) for one in arguments]}
