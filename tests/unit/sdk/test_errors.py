"""The tree of exceptions, as its docstring draws it."""

from __future__ import annotations

import re

from dray import errors


def drawn() -> dict[str, tuple[str, str | None]]:
    """Name -> (name of the base, code) of each line of the tree in the docstring."""
    found: dict[str, tuple[str, str | None]] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([ |+]*)([A-Z]\w+)(?: +([a-z_]+))?(?: |$)", line)
        if match is None or not line.startswith("    "):
            continue
        depth, name, code = len(match[1]), match[2], match[3]
        while above and above[-1][0] >= depth:
            above.pop()
        found[name] = (above[-1][1] if above else "Exception", code)
        above.append((depth, name))
    return found


def all_errors(base: type[Exception]) -> dict[str, type[Exception]]:
    found = {base.__name__: base}
    for kind in base.__subclasses__():
        found |= all_errors(kind)
    return found


def test_the_tree_that_is_drawn_is_the_tree_that_is() -> None:
    tree, kinds = drawn(), all_errors(errors.DrayError)
    assert set(tree) == set(kinds)
    for name, (base, _) in tree.items():
        assert kinds[name].__bases__[0].__name__ == base, name


def test_each_code_stands_beside_its_class() -> None:
    tree = drawn()
    for code, kind in errors.CODES.items():
        assert tree[kind.__name__][1] == code


def test_importing_the_errors_loads_nothing_heavy() -> None:
    from tests.unit.sdk.test_exports import imported_by

    assert not imported_by("import dray.errors") & {"httpx", "pydantic", "yaml", "rich"}
