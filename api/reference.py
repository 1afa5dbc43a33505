"""The reference page of the API, rendered on the server from the OpenAPI description.

The page loads no files and runs no script. The Content-Security-Policy allows the page's only style
sheet by its hash."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 70rem; padding: 1.5rem; }
h1 { margin: 0; } h2 { margin-top: 3rem; } h3 { margin: 2.5rem 0 .5rem; overflow-wrap: anywhere; }
nav ul { columns: 20rem; list-style: none; padding: 0; }
code, pre { font: .9em/1.45 ui-monospace, monospace; }
pre { background: var(--soft); border-radius: 6px; overflow: auto; padding: .8rem; }
table { border-collapse: collapse; width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .8rem .35rem 0; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
th, .method { white-space: nowrap; } nav li { overflow-wrap: anywhere; }
.method { border: 1px solid var(--line); border-radius: 4px; padding: 0 .4rem; }
.scroll { overflow-x: auto; } .soft { opacity: .75; }
a { color: light-dark(#0550ae, #79b8ff); }
"""
_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "pattern": "like {}",
}


def render(document: Mapping[str, Any]) -> str:
    """Return the page for an OpenAPI document."""
    called = list(operations(document))
    by_tag: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for operation in called:
        by_tag.setdefault(operation[2]["tags"][0], []).append(operation)
    schemas = document["components"]["schemas"]
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}: the API</title><style>{STYLE}</style></head><body>",
            f"<header><h1>{escape(title)}</h1><p>{_text(info['description'])} ",
            'For programs: <a href="openapi.json">openapi.json</a>.</p></header>',
            "<nav><ul>",
            *(_entry(*operation) for operation in called),
            '<li><a href="#schemas">Documents and answers</a></li></ul></nav><main>',
            *(part for tag, found in by_tag.items() for part in _section(tag, found)),
            '<h2 id="schemas">Documents and answers</h2>',
            *(_schema(name, schema) for name, schema in sorted(schemas.items())),
            "</main></body></html>",
        )
    )


def operations(document: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation


def _entry(method: str, path: str, operation: Mapping[str, Any]) -> str:
    name = escape(operation["operationId"])
    return f'<li><a href="#{name}"><code>{method} {escape(path)}</code></a></li>'


def _section(tag: str, found: Iterable[tuple[str, str, Mapping[str, Any]]]) -> Iterator[str]:
    yield f"<h2>{escape(tag.capitalize())}</h2>"
    for method, path, operation in found:
        name = escape(operation["operationId"])
        yield f'<section id="{name}"><h3><code><span class="method">{method}</span> '
        yield f"{escape(path)}</code></h3>{_paragraphs(operation.get('description', ''))}"
        yield from parts_of_call(operation)
        yield "</section>"


def parts_of_call(operation: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parameters, the body and the responses of a call, as tables with examples."""
    rows = [
        (
            f"<code>{escape(parameter['name'])}</code>",
            escape(parameter["in"]) + (", required" if parameter.get("required") else ""),
            _kind(parameter["schema"]),
            _text(parameter.get("description") or parameter["schema"].get("description", "")),
        )
        for parameter in operation.get("parameters", ())
    ]
    yield _table(("Parameter", "In", "Type", ""), rows)
    if body := operation.get("requestBody"):
        yield f"<p>Body{'' if body.get('required') else ', optional'}: "
        yield f"{_content(body['content'])}</p>{_example(body['content'])}"
    yield _table(
        ("Status", "Answer", ""),
        [
            (f"<code>{status}</code>", _content(answer.get("content", {})), _description(answer))
            for status, answer in operation["responses"].items()
        ],
    )
    for answer in operation["responses"].values():
        yield _example(answer.get("content", {}))


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    head = f'<section id="schema-{escape(name)}"><h3><code>{escape(name)}</code></h3>'
    return f"{head}{_paragraphs(schema.get('description', ''))}{fields_of(schema)}</section>"


def fields_of(schema: Mapping[str, Any]) -> str:
    """Return a table of the fields of a document or response, or the type if the schema has no
    fields."""
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(field)}</code>",
            _kind(part) + ("" if field not in required else ' <span class="soft">required</span>'),
            f"<code>{escape(json.dumps(part['default']))}</code>" if "default" in part else "",
            _text(part.get("description", "")),
        )
        for field, part in schema.get("properties", {}).items()
    ]
    return _table(("Field", "Type", "Default", ""), rows) or f"<p>{_kind(schema)}</p>"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of a value in words, with links to other types."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_kind, options)))
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind = escape(str(schema.get("format") or schema.get("type", "any")))
    if "items" in schema:
        kind = f"list of {_kind(schema['items'])}"
    elif isinstance(values := schema.get("additionalProperties"), dict):
        kind = f"object of {_kind(values)}"
    bounds = [text.format(schema[name]) for name, text in _BOUNDS.items() if name in schema]
    return f"{kind} <span class='soft'>{escape(', '.join(bounds))}</span>" if bounds else kind


def _content(content: Mapping[str, Any]) -> str:
    kinds = [
        _kind(part.get("schema", {})) + f" <span class='soft'>{escape(media_type)}</span>"
        for media_type, part in content.items()
    ]
    return ", or ".join(kinds)


def _description(answer: Mapping[str, Any]) -> str:
    text = answer.get("description", "")
    return "" if text == "Successful Response" else _text(text)


def _example(content: Mapping[str, Any]) -> str:
    for part in content.values():
        if (example := part.get("example")) is not None:
            text = example if isinstance(example, str) else json.dumps(example, indent=2)
            return f"<details><summary>Example</summary><pre>{escape(text)}</pre></details>"
    return ""


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in names)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>{lines}</table></div>'


def _paragraphs(text: str) -> str:
    return "".join(f"<p>{_text(part)}</p>" for part in text.split("\n\n") if part.strip())


def _text(text: str) -> str:
    """Return a description as HTML, in which text in backticks becomes code."""
    return re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(text))
