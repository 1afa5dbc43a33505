"""Which tests `make test` runs, and which it leaves to `make soak`, which runs all of them.

`make test` takes one representative of each kind: a mesh an axis, a product of two, a database
where another one adds nothing. The others are marked `soak`.
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
"""Whether drawn cases are drawn anew, as `make soak` does. `make test` draws the same ones each
time, so that a change is judged by what it changed."""


def soak(*values: Any) -> Any:
    """The values of one parameter set that only `make soak` tries."""
    return pytest.param(*values, marks=SOAK)


ON_SQLITE = pytest.mark.parametrize("database_url", ["sqlite", soak("postgresql")], indirect=True)
"""Of a test with a database whose subject is a rule and no statement of SQL: `make test` tries it
on SQLite alone."""
ONE_SET = pytest.mark.one_set
"""Of a costly test with parameters: `make test` tries its first set of parameters alone."""
RULES = pytest.mark.rules
"""Of a module whose subject is rules and not SQL: `make test` tries its tests on SQLite alone."""


def soak_but(names: Iterable[Any], *, short: Collection[Any]) -> list[Any]:
    """`names` as parameters, of which `make test` tries those in `short`, `make soak` all.

    ValueError if `short` has a name that is not among them.
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
"""Of tests that look at the web page; pytest names them at its end where they are left out."""
