"""The Python, YAML and JSON code blocks of the documentation can be parsed."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("benchmarks/*.md")])
PARSERS: dict[str, Callable[[str], Any]] = {
    "python": ast.parse,
    "yaml": lambda text: list(yaml.safe_load_all(text)),
    "json": json.loads,
}
BLOCK = re.compile(r"^( *)```(python|yaml|json)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_can_be_parsed(page: Path) -> None:
    for _, language, block in BLOCK.findall(page.read_text()):
        PARSERS[language](textwrap.dedent(block))
