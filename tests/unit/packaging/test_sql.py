"""SQL is written only in `service/db`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("api", "dray", "ray_workers", "service")
TYPES = {"Row", "Session"}
"""Types that other packages can import from SQLAlchemy, for annotations."""


def imported(source: str) -> Iterator[str]:
    """Names that come from SQLAlchemy; the module itself where it is imported whole."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "sqlalchemy")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sqlalchemy":
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from sqlalchemy import Row, select", ["Row", "select"]),
        ("from sqlalchemy.orm import Session", ["Session"]),
        ("def f():\n    import sqlalchemy as sa", ["sqlalchemy"]),
        ("import sqlalchemy.dialects.sqlite", ["sqlalchemy.dialects.sqlite"]),
        ("from service.db import session", []),
    ],
)
def test_each_way_to_import_is_found(source: str, names: list[str]) -> None:
    assert list(imported(source)) == names


def test_only_the_database_package_imports_more_than_types_from_sqlalchemy() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {
        str(path.relative_to(ROOT)): extra
        for path in files
        if not path.is_relative_to(ROOT / "service" / "db")
        and (extra := set(imported(path.read_text())) - TYPES)
    }
    assert len(files) > 100
    assert found == {}
