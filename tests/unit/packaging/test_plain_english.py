"""The prose checker finds what its lists name, at the right line, and accepts proper uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plain_english.__main__ import findings


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("a.py", '"""Of a rank, its step."""', [(1, "a docstring that begins with 'Of'")]),
        ("a.py", 'size = 1\n"""As given."""', [(2, "a docstring that begins with 'As'")]),
        ("a.py", '"""Offsets of a table."""', []),
        ("a.py", '"""A size. What a rank has."""', [(1, "What")]),
        ("a.py", '"""A size. What is a size?"""', []),
        ("a.py", "# a line\n# that says\n# more\nx = 1", [(2, "says")]),
        ("a.py", "# so\n# many workers", [(1, "so # many")]),
        ("a.py", 'x = f"job {name} stands by for slots"', [(1, "stands by")]),
        ("a.py", 'x = {"said": 1}', []),
        ("a.py", "def tells_all(): ...", [(1, "tells")]),
        ("a.py", "by_seat = MachinePace = 1", [(1, "pace"), (1, "seat")]),
        ("a.py", "room_is_made = at_own_pace = True", []),
        ("a.py", "x = {file.tell(): 1}", []),
        ("a.py", "# Kept is the median of them.", [(1, "Kept is")]),
        ("a.py", "# The sizes tell two runs apart.", []),
        ("a.py", "# nobody waits  plain: ok", []),
        ("a.md", "Files.\n\n```sh\necho nobody\n```\nSorted are files.", [(6, "Sorted are")]),
        ("a.md", "The user `nobody`, and [a page](told.md).", []),
        ("a.js", "// what is wrong with it", [(1, "what is wrong with")]),
    ],
)
def test_findings(name: str, source: str, expected: list[tuple[int, str]]) -> None:
    assert [(one.line, one.found) for one in findings(Path(name), source)] == expected
