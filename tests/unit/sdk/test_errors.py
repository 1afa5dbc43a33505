"""The exception hierarchy matches its docstring."""

from __future__ import annotations

import re

from dray import errors


def drawn() -> dict[str, str]:
    """Return the name of the base class, by name, for each line of the tree in the docstring."""
    found: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([ |+]*)([A-Z]\w+)(?: |$)", line)
        if match is None or not line.startswith("    "):
            continue
        depth, name = len(match[1]), match[2]
        while above and above[-1][0] >= depth:
            above.pop()
        found[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    return found


def all_errors(base: type[Exception]) -> dict[str, type[Exception]]:
    found = {base.__name__: base}
    for kind in base.__subclasses__():
        found |= all_errors(kind)
    return found


def test_the_tree_that_is_drawn_is_the_tree_that_is() -> None:
    tree, kinds = drawn(), all_errors(errors.DrayError)
    of_codes = {kind.__name__ for kind in errors.CODES.values()}
    assert set(tree) | of_codes == set(kinds)
    for name, base in tree.items():
        assert kinds[name].__bases__[0].__name__ == base, name


def test_each_code_has_a_status_and_a_class_of_that_kind() -> None:
    for code, kind in errors.CODES.items():
        assert 400 <= kind.http_status < 600, code
        assert (kind.http_status >= 500) == issubclass(kind, errors.ServerError), code
        assert (kind.http_status == 404) == issubclass(kind, errors.NotFound), code
        conflicts = {409, errors.AnnotationsChanged.http_status}
        assert (kind.http_status in conflicts) == issubclass(kind, errors.Conflict), code


def test_importing_the_errors_loads_nothing_heavy() -> None:
    from tests.unit.sdk.test_exports import imported_by

    assert not imported_by("import dray.errors") & {"httpx", "pydantic", "yaml", "rich"}
