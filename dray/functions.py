"""Run functions as jobs: the client pickles the function and uploads it as code, and every rank
calls it."""

from __future__ import annotations

import inspect
import math
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dray.arguments import MAX_CHARS, MAX_PARAMETERS, Value
from dray.errors import SpecError

ENTRYPOINT: Final = "dray_function.py"
"""File name of the program of a job that runs a function. The server recognises such jobs by this
name."""
PICKLE: Final = "function.pkl"
RESULT: Final = "result.pkl"
"""Name of the artifact that contains the result of rank 0."""

_SECRET = re.compile(r"passw|secret|token$|api_?key|credential", re.IGNORECASE)
_MAX_DEPTH = 4
"""Maximum nesting of mappings."""

_PROGRAM = '''"""Calls the function that `submit_function` of dray's client has sent."""

from dray.train.functions import call

call({pickle!r}, python={python!r})
'''


def write(folder: Path, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Write the files of the job's code into an empty folder.

    A function from a notebook, a script or the user's own module is pickled together with the
    objects that it uses from the same source. Installed packages are not pickled but imported on
    the node. Raises SpecError if an object can't be pickled."""
    cloudpickle = _cloudpickle()
    with _by_value(cloudpickle, sys.modules.get(getattr(function, "__module__", ""))):
        try:
            data = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
        except Exception as error:  # the objects' own methods can raise anything
            raise SpecError(
                f"the function can't be pickled: {type(error).__name__}: {error}",
                hint="create files, locks and connections inside the function",
            ) from error
    (folder / PICKLE).write_bytes(data)
    program = _PROGRAM.format(pickle=PICKLE, python=list(sys.version_info[:2]))
    (folder / ENTRYPOINT).write_text(program)


def document(
    function: Callable[..., Any],
    parameters: Mapping[str, Value],
    num_workers: int,
    spec: Mapping[str, Any] | None,
    code: str,
) -> dict[str, Any]:
    """Return the job document for a function. `spec` contains all other parts of the document.
    Raises SpecError if `spec` names another program."""
    parts = dict(spec or {})
    for part in ("script", "recipe"):
        if part in parts:
            raise SpecError(
                "must be omitted, because the job runs the submitted function", pointer=f"/{part}"
            )
    resources = {**parts.pop("resources", {}), "num_workers": num_workers}
    name = getattr(function, "__name__", "function").strip("<>") or "function"
    script = {"entrypoint": ENTRYPOINT, "code": code, "parameters": dict(parameters)}
    return {"name": name, **parts, "script": script, "resources": resources}


def parameters(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Value]:
    """Return the arguments of a call by name, including defaults. Only numbers, strings and
    booleans are returned; items of mappings are named `name.key`. Arguments whose name suggests a
    secret are omitted."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):  # the call itself will fail, or the function has no signature
        return {}
    bound.apply_defaults()
    found: dict[str, Value] = {}
    for name, value in _named("", bound.arguments):
        if len(found) < MAX_PARAMETERS:
            found[name[:MAX_CHARS]] = value[:MAX_CHARS] if isinstance(value, str) else value
    return found


def _named(prefix: str, values: Mapping[Any, Any], depth: int = 0) -> Iterator[tuple[str, Value]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if _SECRET.search(name) or not name.isprintable():
            continue
        if isinstance(value, Mapping):
            if depth < _MAX_DEPTH:
                yield from _named(f"{name}.", value, depth + 1)
        elif isinstance(value, bool):
            yield name, value
        elif isinstance(value, str):
            if value.isprintable():
                yield name, str(value)
        elif isinstance(value, Integral) and abs(int(value)) < 2**53:
            yield name, int(value)
        elif isinstance(value, Real) and math.isfinite(value):  # also numpy's numbers
            yield name, float(value)


def load_result(path: Path) -> Any:
    """Load the result from a downloaded artifact. Unpickling can run arbitrary code from the
    job."""
    return _cloudpickle().loads(path.read_bytes())


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError:
        raise SpecError(
            "submitting functions requires the package cloudpickle: pip install 'dray[functions]'"
        ) from None
    return cloudpickle


@contextmanager
def _by_value(cloudpickle: Any, module: ModuleType | None) -> Iterator[None]:
    """Pickle functions and classes of the user's own module by value, because the node can't import
    the module."""
    if module is None or module.__name__ == "__main__" or not _is_own(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_own(module: ModuleType) -> bool:
    """Whether a module is outside all folders of installed packages."""
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    installed: Sequence[str] = list(sysconfig.get_paths().values())
    return not any(Path(file).is_relative_to(folder) for folder in installed)
