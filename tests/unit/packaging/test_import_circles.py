"""No module imports itself through others, whether at its top or within functions."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp


def test_no_imports_go_in_a_circle() -> None:
    """Imports for type checkers are allowed: a check of a whole job document names its class."""
    graph = grimp.build_graph(
        *("api", "service", "ray_workers", "dray"),
        exclude_type_checking_imports=True,
        cache_dir=None,
    )
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as circle:
        raise AssertionError(" imports ".join(reversed(circle.args[1]))) from None
