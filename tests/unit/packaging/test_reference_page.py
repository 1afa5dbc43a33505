"""docs/reference.md is what `make reference` writes."""

from __future__ import annotations

from tests.unit.packaging.reference_page import PAGE, page


def test_the_page_of_methods_and_commands_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make reference`"


def test_every_method_and_every_command_says_what_it_does() -> None:
    assert [line for line in page().splitlines() if line.endswith("|  |")] == []
