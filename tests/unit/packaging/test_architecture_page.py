"""docs/explanation/architecture.md names packages and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TOP = ("api", "dray", "ray_workers", "service", "tests")


def test_every_package_and_file_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    named = {name for name in re.findall(r"`([a-z_/0-9.]+)`", page) if name.split("/")[0] in TOP}
    assert len(named) > 40
    missing = [
        name
        for name in sorted(named)
        if not (ROOT / name).exists() and not (ROOT / f"{name.replace('.', '/')}.py").exists()
    ]
    assert missing == []


def test_every_package_has_a_docstring_with_its_purpose() -> None:
    rooms = [
        path
        for top in ("api", "service", "ray_workers")
        for path in (ROOT / top).rglob("__init__.py")
        if any(other.name != "__init__.py" for other in path.parent.glob("*.py"))
    ]
    assert [str(path) for path in rooms if not path.read_text().startswith('"""')] == []
