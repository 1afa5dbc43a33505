"""Differences between two versions of a text."""

from __future__ import annotations

import random

import pytest

from service.domain.tracking.line_diff import MAX_EDITS, is_binary, line_diff
from tests.seeds import drawn


def applied(old: bytes, text: str) -> bytes:
    """Apply hunks to a text, without the code that wrote them."""
    lines, found, at = old.decode().split("\n"), "", 0
    end = ""
    for row in text.split("\n")[:-1]:
        if row.startswith("@@"):
            begin, count = (int(n) for n in row.split()[1][1:].split(","))
            begin = begin - 1 if count else begin
            found += "".join(f"{line}\n" for line in lines[at:begin])
            at = begin
        elif row.startswith("\\"):
            found = found.removesuffix(end)
        else:
            end = "" if row[0] == "-" else "\n"
            found += "" if row[0] == "-" else f"{row[1:]}\n"
            at += row[0] != "+"
    return (found + "\n".join(lines[at:])).encode() if text else old


def longest(a: list[bytes], b: list[bytes]) -> int:
    """The length of a longest common subsequence, by a table."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            above = max(table[i][j + 1], table[i + 1][j])
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else above
    return table[-1][-1]


def lines_of(text: bytes) -> list[bytes]:
    return text.splitlines(keepends=True)


@pytest.mark.parametrize("seed", drawn(300))
def test_the_fewest_lines_change_and_the_hunks_lead_to_the_new_text(seed: int) -> None:
    random_ = random.Random(seed)
    lines = [b"a\n", b"b\n", b"\n", "ü ☃\n".encode(), b"return\n"][: random_.randint(1, 5)]

    def text() -> bytes:
        last = random_.choice([b"", b"a", b"no newline"])
        return b"".join(random_.choices(lines, k=random_.randint(0, 25))) + last

    old, new = text(), text()
    found = line_diff(old, new)
    common = longest(lines_of(old), lines_of(new))
    assert found.num_added == len(lines_of(new)) - common
    assert found.num_removed == len(lines_of(old)) - common
    assert applied(old, found.text) == new


def test_hunks_have_three_lines_of_context_and_are_joined_if_they_touch() -> None:
    old = b"".join(b"%d\n" % n for n in range(40))
    new = old.replace(b"\n5\n", b"\nfive\n").replace(b"\n12\n", b"\n").replace(b"\n30\n", b"\n3x\n")
    assert line_diff(old, new).text == (
        "@@ -3,14 +3,13 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n 8\n 9\n 10\n 11\n-12\n 13\n 14\n 15\n"
        "@@ -28,7 +27,7 @@\n 27\n 28\n 29\n-30\n+3x\n 31\n 32\n 33\n"
    )


def test_a_carriage_return_and_a_missing_newline_are_differences() -> None:
    found = line_diff(b"a\r\nb", b"a\nb\n")
    assert found.text == ("@@ -1,2 +1,2 @@\n-a\r\n-b\n\\ No newline at end of file\n+a\n+b\n")
    assert line_diff(b"", b"").text == ""
    assert line_diff(b"", b"a\n").text == "@@ -0,0 +1,1 @@\n+a\n"
    assert line_diff(b"\xff\n", b"\xfe\n").text == "@@ -1,1 +1,1 @@\n-\ufffd\n+\ufffd\n"


def test_lines_that_are_moved_too_often_count_as_replaced() -> None:
    numbers = [b"%d\n" % n for n in range(2 * MAX_EDITS)]
    shuffled = numbers[::-1]
    found = line_diff(b"".join(numbers), b"".join(shuffled))
    assert found.num_added == found.num_removed == len(numbers)
    # Lines that only one of the versions has don't count.
    others = [b"x%d\n" % n for n in range(2 * MAX_EDITS)]
    found = line_diff(
        b"first\n" + b"".join(numbers) + b"last\n", b"".join([b"0\n", *others, b"last\n"])
    )
    assert (found.num_added, found.num_removed) == (len(others), len(numbers))


def test_a_file_with_a_nul_at_its_start_is_binary() -> None:
    assert is_binary(b"a\0")
    assert not is_binary(b"a" * 8000 + b"\0")
