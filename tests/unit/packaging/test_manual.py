"""The manual is built strictly, has what the code has, and fits the policy of the page."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from manual import http_api, metrics, settings
from manual.content_security import move_inline_parts

from service.domain.events import REMARKS
from tests.marks import soak

ROOT = Path(__file__).resolve().parents[3]
REPORTED = re.compile(r'"((?:train|perf|sync|federated)/[a-z_]+)"')


@pytest.mark.timeout(900)
@pytest.mark.skipif(importlib.util.find_spec("furo") is None, reason="the extra `docs` is missing")
@pytest.mark.parametrize("builder", ["dummy", soak("html")])
def test_the_manual_is_built_without_a_warning(tmp_path: Path, builder: str) -> None:
    """Sphinx warns of a dead link or anchor, and of a page that no table of contents has. The
    builder `dummy` finds them too, but writes no page."""
    command = [sys.executable, "-m", "sphinx", "-q", "-j", "2", "-W", "--keep-going"]
    folders = ["-d", tmp_path / "doctrees", "-b", builder, "docs", tmp_path / "manual"]
    built = subprocess.run(
        [*command, *folders], cwd=ROOT, capture_output=True, text=True, timeout=880, check=False
    )
    assert built.returncode == 0, built.stderr
    if builder == "html":
        assert (tmp_path / "manual" / "reference" / "settings.html").is_file()
        assert (tmp_path / "manual" / "searchindex.js").is_file()


def test_inline_parts_become_files(tmp_path: Path) -> None:
    page = tmp_path / "guides" / "page.html"
    page.parent.mkdir()
    (tmp_path / "_static").mkdir()
    page.write_text('<style>p {}</style><script>go()</script><svg style="display: none;"></svg>')
    sheet = tmp_path / "_static" / "theme.css"
    sheet.write_text("a { background: url('data:image/svg+xml;charset=utf-8,%3Csvg/>') }")
    move_inline_parts(tmp_path)
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.read_text())
    assert [(page.parent / name).read_text() for name in loaded] == ["p {}", "go()"]
    assert '<svg display="none"></svg>' in page.read_text()
    (icon,) = re.findall(r'url\("(.+)"\)', sheet.read_text())
    assert (sheet.parent / icon).read_text() == "<svg/>"


@pytest.mark.parametrize("part", ['<p onclick="go()">', '<p style="color: red">', "<script async>"])
def test_a_part_that_stays_inline_ends_the_build(tmp_path: Path, part: str) -> None:
    (tmp_path / "page.html").write_text(part)
    with pytest.raises(ValueError, match=r"page\.html"):
        move_inline_parts(tmp_path)


def test_every_setting_has_a_meaning() -> None:
    rows = re.findall(r"^\| `(DRAY_\w+)` \| .+? \| (.*) \|$", settings.page(), re.MULTILINE)
    assert len(rows) > 50
    assert [name for name, meaning in rows if not meaning.strip()] == []


def test_every_call_is_in_the_reference() -> None:
    page = http_api.page()
    assert "### `POST /v1/jobs`" in page
    assert "(schema-Job)=" in page


def test_every_series_that_workers_report_is_explained() -> None:
    sources = [path.read_text() for path in (ROOT / "ray_workers").rglob("*.py")]
    reported = {key for source in sources for key in REPORTED.findall(source)}
    assert len(reported) > 20
    page = metrics.page()
    assert [key for key in sorted(reported) if f"`{key}`" not in page] == []


def _types_of_events() -> Iterator[str]:
    """The types that calls of `remark` and events without a transition are given as literals."""
    for path in (ROOT / "service").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.keyword(arg="type_", value=ast.Constant(value=str(type_))):
                    yield type_
                case ast.Call(
                    func=ast.Attribute(attr="_remark" | "_remark_once"),
                    args=[ast.Constant(value=str(type_)), *_],
                ):
                    yield type_


def test_every_event_is_explained() -> None:
    types = set(_types_of_events())
    assert len(types) > 15
    assert types <= REMARKS.keys()
