"""Generates the SDK reference, which autodoc fills with the docstrings of public names."""

from __future__ import annotations

from collections.abc import Iterator

import dray

_PAGE = """# Classes and functions

`dray.AsyncClient` has the methods of `dray.Client` as coroutines. [The guide](../guides/sdk.md)
shows examples.

## The client

```{eval-rst}
.. autoclass:: dray.client.Client
   :members:
   :inherited-members:

.. autoclass:: dray._http.transport.Retry
   :members:
```

## Documents

```{eval-rst}
.. autofunction:: dray.documents.validate

.. autofunction:: dray.documents.load_spec

.. autofunction:: dray.example_preview.preview
```

## Models

```{eval-rst}
.. autofunction:: dray.inference.load
```

## In a training script

```{eval-rst}
.. automodule:: dray.train
   :members:
   :imported-members:
```

## Errors

```{eval-rst}
.. automodule:: dray.errors

%s
```
"""


def page() -> str:
    errors = _without_code(dray.errors.DrayError)
    names = (f".. autoexception:: dray.errors.{kind.__name__}\n   :members:\n" for kind in errors)
    return _PAGE % "\n".join(names)


def _without_code(base: type[Exception]) -> Iterator[type[Exception]]:
    """Yield `base` and its subclasses without a problem code, as in the tree of `dray.errors`."""
    yield base
    for kind in base.__subclasses__():
        if kind not in dray.errors.CODES.values():
            yield from _without_code(kind)
