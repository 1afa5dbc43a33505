"""Marks that select the tests of `make test`. `make soak` runs all tests.

`make test` runs one representative of each kind: one mesh per axis, one product of two axes, and
one database where the other adds nothing. All others are marked `soak`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Collection, Iterable
from typing import Any

import pytest

SOAK = pytest.mark.soak
FRESH_SEEDS = bool(os.environ.get("DRAY_FRESH_SEEDS"))
"""Whether to draw new random cases, as `make soak` does. `make test` always draws the same cases,
so that a new failure is due to the change under test."""


def soak(*values: Any) -> Any:
    """Return a parameter set that only `make soak` tries."""
    return pytest.param(*values, marks=SOAK)


ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite", soak("postgresql")], indirect=True)
"""Marks a test that needs a database but tests a rule, not SQL: `make test` runs it on SQLite
only."""
ONE_SET = pytest.mark.one_set
"""Marks a costly test with parameters: `make test` tries only the first set of parameters."""
RULES = pytest.mark.rules
"""Marks a module that tests rules, not SQL: `make test` runs its tests on SQLite only."""


def soak_but(names: Iterable[Any], *, short: Collection[Any]) -> list[Any]:
    """Return `names` as parameters. `make test` tries only the names in `short`, `make soak` all of
    them. Raises ValueError if `short` contains an unknown name.
    """
    known = list(names)
    unknown = set(short) - set(known)
    if unknown:
        raise ValueError(f"no parameter is called {', '.join(map(str, unknown))}")
    return [name if name in short else soak(name) for name in known]


def _lacks_browser() -> bool:
    return shutil.which("chromium") is None or importlib.util.find_spec("playwright") is None


IN_BROWSER = pytest.mark.skipif(
    _lacks_browser(), reason="needs a chromium (apt-get install chromium) and playwright"
)
"""Marks tests of the web page. pytest lists them in its summary if they are skipped."""
