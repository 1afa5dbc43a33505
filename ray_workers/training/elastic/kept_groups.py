"""Keeps process groups alive until the process ends. Can be imported without torch.

Releasing the last reference to a gloo group joins its threads while holding the GIL, but one of
these threads may be waiting for the GIL to release a finished operation. This deadlock has occurred
in a rank at the end of its training, and the rank never exited.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

kept: list[Any] = []
"""The process groups."""
_MODULE = "torch.distributed"


def keep_groups() -> None:
    """Keep every group that is created from now on, including by a script that imports torch
    later."""
    if _MODULE in sys.modules:
        _wrap(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _WrappedOnImport())


class _WrappedOnImport:
    """A finder for torch.distributed that wraps its functions after it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                _wrap(module)

            setattr(spec.loader, "exec_module", execute_and_wrap)  # noqa: B010
        return spec


def _wrap(dist: ModuleType) -> None:
    for name in ("init_process_group", "new_group"):
        if hasattr(dist, name):  # torch can be built without this function
            keeping = _keeping(dist, getattr(dist, name))
            setattr(dist, name, keeping)
            setattr(dist.distributed_c10d, name, keeping)


def _keeping(dist: ModuleType, create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_and_keep(*args: Any, **kwargs: Any) -> Any:
        made = create(*args, **kwargs)
        kept.append(dist.group.WORLD if made is None else made)
        return made

    return create_and_keep
