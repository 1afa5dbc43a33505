"""Generates job documents from the JSON schema: every field, every alternative, at the bounds."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Collection, Iterator
from typing import Any

from dray.spec.authoring.describing import job_schema
from tests.generated.documents.bases import BASES

SCHEMA = job_schema()
TEXTS = (
    *("a", "abc", "A_B", "worker", "x.py", "2h", "90s", "8GiB", "500MB", "val/loss", "train/loss"),
    *("0" * 64, "0" * 40, "code-" + "0" * 32, "job-1", "sklearn://wine", "https://example.org/a"),
    *(
        "pkg.mod:Class",
        "loss: ([0-9.]+)",
        "numpy>=1",
        "echo ok",
        "1.5",
        "-1",
        "",
        "x" * 300,
        "é 中",
    ),
)
MOST = 1 << 62
OPTIONS = 0.13
"""Share of the missing optional fields that are added to a document."""
LEFT_OUT = frozenset({"recipe", "script"})


class Draw:
    """Random choices from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def document(self) -> dict[str, Any]:
        """Return a valid document combined with parts of others and a few changed values."""
        found = copy.deepcopy(self.random.choice(BASES))
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 3))):
            self._change(found)
        more = self._object(SCHEMA, self.random.choice((0.0, 0.05, OPTIONS)), LEFT_OUT)
        self._merge(found, more)
        return found

    def _change(self, document: dict[str, Any]) -> None:
        pointer, value = self.random.choice(list(leaves(document)))
        node: Any = document
        *parents, last = parts_of(pointer)
        for part in parents:
            node = step(node, part)
        node[int(last) if isinstance(node, list) else last] = self._near(value)

    def _near(self, value: Any) -> Any:
        """Return another value, usually of the same type."""
        if isinstance(value, bool) or value is None or self.chance(0.1):
            return self.random.choice((True, False, None, 0, "auto", 1.5))
        if isinstance(value, int | float):
            factor = self.random.choice((0.5, 2, 10, 1000, -1))
            changed = self.random.choice((value + 1, value - 1, 0, value * factor, 1 << 62))
            return int(changed) if isinstance(value, int) else changed
        return self.random.choice(TEXTS)

    def _merge(self, into: dict[str, Any], more: dict[str, Any]) -> None:
        for name, value in more.items():
            if name not in into:
                into[name] = value
            elif isinstance(value, dict) and isinstance(into[name], dict) and self.chance(0.5):
                self._merge(into[name], value)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def mutated(self, document: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return a copy in which one value is invalid, and the pointer to that value."""
        free = ("/model/args", "/labels", "/script/parameters", "/sweep")  # accept any names
        places = [one for one in objects(document) if not one[0].startswith(free)]
        pointer, node = self.random.choice(places)
        names = [name for name in node if f"{pointer}/{name}" != "/model/args"]  # any object
        name = self.random.choice(("zzz", "__proto__", "", "a/b", *names))
        changed = copy_with(document, pointer, name, {"zzz": [None]})
        return changed, f"{pointer}/{escaped(name)}"

    def _of(self, node: dict[str, Any]) -> Any:
        if "$ref" in node:
            return self._of(SCHEMA["$defs"][node["$ref"].rpartition("/")[2]])
        if "anyOf" in node and "properties" not in node:
            return self._of(self.random.choice(node["anyOf"]))
        if "const" in node:
            return node["const"]
        if "enum" in node:
            return self.random.choice(node["enum"])
        match node.get("type"):
            case "object":
                return self._object(node, 0.25)
            case "array":
                return self._list(node)
            case "boolean":
                return self.random.random() < 0.5
            case "integer" | "number":
                return self._number(node)
            case "null":
                return None
        return self._text(node)

    def _object(
        self, node: dict[str, Any], share: float, leave_out: Collection[str] = ()
    ) -> dict[str, Any]:
        found = {}
        required = node.get("required", ())
        for name, inner in node.get("properties", {}).items():
            if name in leave_out:
                continue
            if name in required or self.random.random() < share:
                found[name] = self._of(inner)
        more = node.get("additionalProperties")
        if isinstance(more, dict):
            for _ in range(self.random.randint(0, 2)):
                key = self._text(node.get("propertyNames", {"type": "string"}))
                found[key] = self._of(more)
        return found

    def _list(self, node: dict[str, Any]) -> list[Any]:
        if "prefixItems" in node:
            return [self._of(each) for each in node["prefixItems"]]
        least = node.get("minItems", 0)
        number = self.random.randint(least, least + 2)
        return [self._of(node.get("items", {})) for _ in range(number)]

    def _number(self, node: dict[str, Any]) -> float | int:
        is_whole = node["type"] == "integer"
        least = node.get("minimum", node.get("exclusiveMinimum", -5))
        most = node.get("maximum", node.get("exclusiveMaximum", MOST))
        kind = self.random.random()
        if kind < 0.08:
            return self.random.choice((least, most, least - 1, most + 1))
        if "default" in node and kind < 0.2:
            default: float = node["default"]
            return default
        if is_whole:
            return self.random.randint(int(least), int(min(most, least + 6)))
        return self.random.choice(
            (0.5, 0.1, 0.9, 1e-3, 1.0, 2, least + (min(most, least + 1) - least) / 3)
        )

    def _text(self, node: dict[str, Any]) -> str:
        wanted = [*TEXTS, *node.get("examples", ())]
        pattern = node.get("pattern")
        fit = [text for text in wanted if pattern is None or re.search(pattern, text)]
        text: str = self.random.choice(fit or wanted)
        return text


def escaped(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")


def objects(node: Any, pointer: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Return each object of a document by its pointer."""
    if isinstance(node, dict):
        yield pointer, node
        for name, inner in node.items():
            yield from objects(inner, f"{pointer}/{escaped(name)}")


def leaves(node: Any, pointer: str = "") -> Iterator[tuple[str, Any]]:
    """Return each scalar or empty value of a document."""
    if isinstance(node, dict | list) and node:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for name, inner in items:
            yield from leaves(inner, f"{pointer}/{escaped(name)}")
    else:
        yield pointer, node


def parts_of(pointer: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]]


def step(node: Any, part: str) -> Any:
    """Return the child of a node; KeyError, IndexError or ValueError if there is none."""
    if isinstance(node, list):
        return node[int(part)]
    if isinstance(node, dict):
        return node[part]
    raise KeyError(part)


def copy_with(document: dict[str, Any], pointer: str, name: str, value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    node: Any = changed
    for part in parts_of(pointer):
        node = step(node, part)
    node[name] = value
    return changed
