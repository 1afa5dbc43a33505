"""docker/compose.yaml as Compose reads it: YAML, merge keys and interpolated variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).resolve().parents[3] / "docker"

_VARIABLE = re.compile(r"\$\{([A-Z_]+)(?:(:-|:\?)([^}]*))?\}")


class Unset(Exception):
    """A required variable is not set; the message is the one in the file."""


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """As Compose does it, for the forms `${NAME}`, `${NAME:-default}` and `${NAME:?message}`."""

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if variables.get(name):
            return variables[name]
        if operator == ":?":
            raise Unset(rest)
        return rest or ""

    return _VARIABLE.sub(value, text)


def _interpolated(node: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _interpolated(value, variables) for key, value in node.items()}
    if isinstance(node, list):
        return [_interpolated(value, variables) for value in node]
    return interpolate(node, variables) if isinstance(node, str) else node


def load(variables: Mapping[str, str], name: str = "compose.yaml") -> dict[str, Any]:
    """Return the document with its variables filled in. Raises Unset."""
    document: dict[str, Any] = _interpolated(yaml.safe_load((DOCKER / name).read_text()), variables)
    return document


def variables(name: str = "compose.yaml") -> dict[str, str | None]:
    """Return each variable of the file and its default, or None if it has none."""
    text = (DOCKER / name).read_text()
    return {match[1]: match[3] if match[2] == ":-" else None for match in _VARIABLE.finditer(text)}


def command(service: Mapping[str, Any]) -> list[str]:
    """Return the words of its command; empty for the image's own command."""
    given = service.get("command", [])
    return shlex.split(given) if isinstance(given, str) else [str(word) for word in given]
