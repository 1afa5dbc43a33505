"""The section "Threads and locks" of the architecture page names the files that have them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
THREADS = {
    *("threading.Thread", "threading.Timer", "concurrent.futures.ThreadPoolExecutor"),
    *("concurrent.futures.ProcessPoolExecutor", "multiprocessing.Process", "multiprocessing.Pool"),
}
KINDS = ("Lock", "RLock", "Condition", "Semaphore", "BoundedSemaphore", "Barrier")
LOCKS = {
    *(f"{module}.{kind}" for module in ("threading", "asyncio") for kind in KINDS),
    *("fcntl.flock", "fcntl.lockf"),
}
ADVISORY = re.compile(r"pg_\w*advisory\w*lock")


def test_the_page_names_each_file_that_starts_threads_and_no_other() -> None:
    assert _named("thread") == {name for name, used in _used_names() if used & THREADS}


def test_the_page_names_each_file_that_takes_locks_and_no_other() -> None:
    assert _named("lock") == {
        name
        for name, used in _used_names()
        if used & LOCKS or any(ADVISORY.search(one) for one in used)
    }


def _named(table: str) -> set[str]:
    """The files in the rows of the table whose first column has this name."""
    section = (
        (ROOT / "docs" / "explanation" / "architecture.md")
        .read_text()
        .partition("## Threads and locks")[2]
    )
    rows = section.partition(f"\n| {table} |")[2].partition("\n\n")[0]
    assert rows, f"there is no table of {table}s"
    return set(re.findall(r"`([\w/]+\.py)`", rows))


@functools.cache
def _used_names() -> list[tuple[str, set[str]]]:
    """The files of the product, and the full names and texts of SQL that each uses."""
    return [
        (str(path.relative_to(ROOT)), _names_in(ast.parse(path.read_text())))
        for top in ("api", "service", "ray_workers", "dray")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]


def _names_in(tree: ast.Module) -> set[str]:
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {one.asname or one.name: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(imported.get(node.id, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{imported.get(node.value.id, node.value.id)}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names
