"""Generates the SDK reference, which autodoc fills with the docstrings of public names."""

from __future__ import annotations

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
   :members:
   :exclude-members: %s
```
"""


def page() -> str:
    coded = {kind.__name__ for kind in dray.errors.CODES.values()}
    return _PAGE % ", ".join(sorted(coded))
