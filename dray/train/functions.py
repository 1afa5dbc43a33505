"""Runs on a rank of a job, and calls the function that `dray.functions` has packed."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dray.functions import RESULT
from dray.train.reporting import context, save_artifact


def call(path: str, *, python: Sequence[int]) -> None:
    """Call the function in a file. The function's result on rank 0 becomes an artifact of the job.

    python: major and minor version of the Python that packed the function. Exits with an error
    message if this process runs another version, because bytecode differs between versions.
    """
    here = list(sys.version_info[:2])
    if list(python) != here:
        theirs, ours = (".".join(map(str, version)) for version in (python, here))
        sys.exit(
            f"the function was pickled by Python {theirs}, but this node has Python {ours}: a "
            "pickled function requires the same minor version of Python"
        )
    import cloudpickle

    function, args, kwargs = pickle.loads(Path(path).read_bytes())
    result = function(*args, **kwargs)
    if context().rank != 0:
        return
    try:
        data = cloudpickle.dumps(result)
    except Exception as error:  # the objects' own methods can raise anything
        raise TypeError(
            f"the function returned a {type(result).__name__} that can't be pickled: {error}; "
            "return plain values, and save files with dray.train.save_artifact"
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, RESULT)
        file.write_bytes(data)
        save_artifact(file)
