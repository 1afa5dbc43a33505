"""Generates the HTTP API reference from the API's OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterable

from api import reference
from api.app import description

_HEAD = """# Calls

This page lists every call of the HTTP API. [The guide](../guides/http.md) shows the most common
calls with curl, and `GET /openapi.json` describes all calls in a machine-readable form.
"""


def page() -> str:
    document = description()
    by_tag: dict[str, list[str]] = {}
    for method, path, operation in reference.operations(document):
        text = f"### `{method} {path}`\n\n{operation.get('description', '')}\n"
        parts = by_tag.setdefault(operation["tags"][0], [])
        parts.append(text + _html(reference.parts_of_call(operation)))
    calls = ["\n".join((f"## {tag.capitalize()}\n", *texts)) for tag, texts in by_tag.items()]
    schemas = [
        f"(schema-{name})=\n### `{name}`\n\n{schema.get('description', '')}\n"
        + _html([reference.fields_of(schema)])
        for name, schema in sorted(document["components"]["schemas"].items())
    ]
    return "\n".join((_HEAD, *calls, "## Documents and answers\n", *schemas))


def _html(parts: Iterable[str]) -> str:
    text = "".join(parts).replace("<table>", '<table class="docutils">')
    return f"\n````{{raw}} html\n{text}\n````\n"
