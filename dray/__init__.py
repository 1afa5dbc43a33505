"""dray: submit distributed training jobs over HTTP and read back their state and results.

The package contains only what a user's machine needs: the job document (`dray.spec`), the API's
responses (`dray.views`), the HTTP clients (`dray.Client`, `dray.AsyncClient`), the command line,
and `dray.train`, which training scripts import.

The names below are imported when they are first used (PEP 562), so that importing `dray.train`
doesn't import the HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dray import errors as errors
    from dray._http.transport import Retry
    from dray.aio import AsyncClient as AsyncClient
    from dray.client import Client as Client
    from dray.documents import load_spec as load_spec
    from dray.documents import validate as validate
    from dray.example_preview import preview as preview
    from dray.inference import load as load
    from dray.spec import JobSpec as JobSpec
    from dray.views import JobState as JobState

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "Client",
    "JobSpec",
    "JobState",
    "Retry",
    "__version__",
    "errors",
    "load",
    "load_spec",
    "preview",
    "validate",
]

_MODULES = {
    "AsyncClient": "dray.aio",
    "Client": "dray.client",
    "JobSpec": "dray.spec",
    "JobState": "dray.views",
    "Retry": "dray._http.transport",
    "load": "dray.inference",
    "load_spec": "dray.documents",
    "preview": "dray.example_preview",
    "validate": "dray.documents",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("dray.errors")
    if name not in _MODULES:
        raise AttributeError(f"module 'dray' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
