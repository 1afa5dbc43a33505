"""The blocking client is what `make blocking` writes from the asynchronous one."""

from __future__ import annotations

from tests.unit.packaging.blocking_client import GENERATED, ROOT, blocking, sources


def test_the_blocking_client_is_current() -> None:
    for source, target in sources().items():
        assert target.read_text() == blocking(source, target), f"{target}: run `make blocking`"


def test_nothing_else_is_beside_it() -> None:
    assert set((ROOT / GENERATED).glob("*.py")) <= set(sources().values())
