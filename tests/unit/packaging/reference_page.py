"""Writes docs/reference.md, every method of the SDK and every command: `make reference`.

The sentences are the docstrings of the client and the help of the commands. A test compares the
page with what this script would write.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import typer

from dray import Client
from dray.cli import app as commands_of_all_modules  # noqa: F401  registers them
from dray.cli.base import app

PAGE = Path(__file__).parents[3] / "docs" / "reference.md"
HEAD = """# Methods and commands

Every method of the client and every command, written by `make reference` from their descriptions.
[SDK](sdk.md) and [command line](cli.md) have examples; `help(dray.Client.submit)` and
`dray submit --help` show the parameters.
"""


def page() -> str:
    methods = _table("method", _methods())
    commands = _table("command", _commands())
    return "\n".join([HEAD, "## Methods", "", *methods, "", "## Commands", "", *commands, ""])


def _table(name: str, rows: Iterator[tuple[str, str]]) -> list[str]:
    cells = (f"| `{what}` | {_sentence(text)} |" for what, text in rows)
    return [f"| {name} | does |", "|---|---|", *cells]


def _sentence(text: str) -> str:
    """The first paragraph in one line."""
    return re.sub(r"\s+", " ", text.split("\n\n")[0]).strip().replace("|", "\\|")


def _methods() -> Iterator[tuple[str, str]]:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if not name.startswith("_") and name != "close":
            yield name, inspect.getdoc(method) or ""


def _commands() -> Iterator[tuple[str, str]]:
    every = typer.main.get_command(app)
    for name in every.list_commands(None):  # type: ignore[attr-defined]
        command = every.commands[name]  # type: ignore[attr-defined]
        parts = getattr(command, "commands", {})
        yield f"dray {name}", command.help
        yield from ((f"dray {name} {part}", parts[part].help) for part in parts)


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
