"""Generates the command-line reference from the commands and their help texts."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from dray.cli import app as commands_of_all_modules  # noqa: F401  registers the commands
from dray.cli.base import app
from dray.cli.exits import HELP
from manual.tables import table

_HEAD = """# Commands

Every command accepts `--json`, which prints JSON for programs, and `--url`, the URL of a server
other than `DRAY_URL`. A JOB is an id, the beginning of an id, a name, or `@last`; `NAME/INDEX` is
one job of an array. [The guide](../guides/cli.md) shows examples.

"""
_COMMON = {"--help", "--json", "--url"}
_EXITS = "\n## Exit codes\n\n"


def page() -> str:
    root = typer.main.get_command(app)
    codes = [one.partition(" ") for one in HELP.partition(": ")[2].rstrip(".").split("; ")]
    rows = [(f"`{number}`", meaning) for number, _, meaning in codes]
    return _HEAD + "\n".join(_commands(root, "dray", 2)) + _EXITS + table(("code", "meaning"), rows)


def _commands(group: Any, prefix: str, level: int) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        path = f"{prefix} {name}"
        yield f"{'#' * level} `{path}`\n\n{inspect.cleandoc(command.help or '')}\n"
        if hasattr(command, "commands"):
            yield from _commands(command, path, level + 1)
        else:
            yield _usage(command, path)


def _usage(command: Any, path: str) -> str:
    context = command.make_context(path, [], resilient_parsing=True)
    words = [path, *command.collect_usage_pieces(context)]
    rows = [
        (", ".join(f"`{word}`" for word in (*one.opts, *one.secondary_opts)), one.help or "")
        for one in command.params
        if one.param_type_name == "option" and not one.hidden and not _COMMON & {*one.opts}
    ]
    text = f"```text\n{' '.join(words)}\n```\n"
    return text + ("\n" + table(("option", "meaning"), rows) if rows else "")
