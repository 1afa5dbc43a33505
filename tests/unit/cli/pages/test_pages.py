"""Commands in the text of the documentation exist, and have the options that are used with them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from dray.cli import app as commands_of_all_modules  # noqa: F401  registers them
from dray.cli.base import app

ROOT = Path(__file__).parents[4]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"```.*?```", re.DOTALL)
_INLINE = re.compile(r"`dray ([a-z][^`]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_in_a_sentence_can_be_typed(page: Path) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for text in _INLINE.findall(_BLOCK.sub("", page.read_text())):
        name, *arguments = shlex.split(text)
        try:
            commands[name].make_context(name, arguments)
        except typer.Exit:  # without arguments, it prints its help
            pass
        except typer.BadParameter.__base__ as error:  # type: ignore[misc]
            # A sentence can mention `dray get` or `--code` without the rest of the command.
            if type(error).__name__ not in ("MissingParameter", "BadOptionUsage"):
                pytest.fail(f"`dray {text}`: {error}")
