"""Adds the generated pages, and adapts built pages to the service's Content-Security-Policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from manual import command_line, errors, http_api, job_document, metrics, sdk, settings, states
from manual.content_security import move_inline_parts
from manual.repository_links import resolved

PAGES: Mapping[str, Callable[[], str]] = {
    "job-document": job_document.page,
    "cli": command_line.page,
    "sdk": sdk.page,
    "http": http_api.page,
    "settings": settings.page,
    "metrics": metrics.page,
    "states": states.page,
    "errors": errors.page,
}
_PARAMETERS = re.compile(r"(\w+(?:, \w+)*): (.+)")


def setup(app: Any) -> dict[str, Any]:
    app.connect("builder-inited", _write_reference)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _list_parameters)
    app.connect("build-finished", _finish)
    app.add_css_file("manual.css")
    app.add_js_file("search.js")
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _write_reference(app: Any) -> None:
    for name, make in PAGES.items():
        file, text = Path(app.srcdir, "reference", f"{name}.md"), make()
        if not file.is_file() or file.read_text() != text:  # Sphinx rereads changed files
            file.write_text(text)


def _read(app: Any, name: str, source: list[str]) -> None:
    docs = Path(app.srcdir)
    text = resolved(source[0], docs / f"{name}.md", docs)
    if name == "adr/README":
        text += "".join(f"- [](../{decision})\n" for decision in _decisions(docs))
    elif name.startswith("adr/"):
        # Otherwise the table of contents of each page would list all ADRs, which would double the
        # build time.
        text = f"---\norphan: true\n---\n{text}"
    source[0] = text


def _decisions(docs: Path) -> list[str]:
    return [path.relative_to(docs).as_posix() for path in sorted((docs / "adr").glob("0*.md"))]


def _list_parameters(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Converts the lines of a docstring that describe parameters (`name: meaning`) to list
    items."""
    found: list[str] = []
    in_item = False
    for line in lines:
        parameters = _PARAMETERS.fullmatch(line)
        begins_item = parameters and (in_item or not found or not found[-1])
        if begins_item and parameters:
            found += [] if in_item else [""]
            found.append(f"* **{parameters[1]}**: {parameters[2]}")
        elif in_item and line.startswith("    "):
            found.append(f"  {line.strip()}")
        else:
            found += ["", line] if in_item and line else [line]
        in_item = bool(begins_item) or (in_item and line.startswith("    "))
    lines[:] = found


def _finish(app: Any, exception: Exception | None) -> None:
    if exception is None and app.builder.name == "html":
        move_inline_parts(Path(app.outdir))
