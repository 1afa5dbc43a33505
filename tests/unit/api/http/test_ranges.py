from __future__ import annotations

import pytest

from api.http.downloads import Range, Unsatisfied, parse_range


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("bytes=0-0", Range(0, 1)),
        ("bytes=2-5", Range(2, 6)),
        ("bytes=2-", Range(2, 10)),
        ("bytes=2-99", Range(2, 10)),
        ("bytes=-3", Range(7, 10)),
        ("bytes=-99", Range(0, 10)),
        ("bytes=0-9", Range(0, 10)),
        ("bytes=5-2", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
        ("bytes=0-1,3-4", None),
        ("lines=0-1", None),
        ("bytes=" + "9" * 1000 + "-", None),
    ],
)
def test_a_range_is_read_as_the_rfc_says(header: str | None, expected: Range | None) -> None:
    assert parse_range(header, 10) == expected


@pytest.mark.parametrize(("header", "size"), [("bytes=10-", 10), ("bytes=-0", 10), ("bytes=0-", 0)])
def test_a_range_without_a_byte_is_unsatisfied(header: str, size: int) -> None:
    with pytest.raises(Unsatisfied):
        parse_range(header, size)
