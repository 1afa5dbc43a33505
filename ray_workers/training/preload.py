"""Imports the modules that training processes need. The imports take place in the parent process
from which training processes are forked.

A fork copies only one thread and no CUDA context, so none of these modules may start a thread, use
a GPU, or open a connection when imported. Each new process must itself import any module that is
not listed in this file.
"""

from __future__ import annotations

import contextlib
import importlib
import os

_MODULES = (
    "torch",
    "torch.distributed",
    "torch.nn.functional",
    "torch.nn.parallel",
    "torch.utils.serialization.config",  # for torch.save and torch.load
    "numpy",
    "fsspec",
    "fsspec.implementations.local",
    "safetensors.torch",
    "sklearn.datasets",
    "runpy",
    "ray_workers.recipes",
    "ray_workers.training.process.rank_main",
    "ray_workers.training.loop.trainer",
    "ray_workers.training.elastic.store_server",
    "dray.train.prepared.loader",
    "dray.train.prepared.saving",
)


def preload() -> None:
    """Import all modules, and load the data set that is part of a library. Does not start
    threads.

    Raises ImportError if a module is missing. Must be called before numpy is imported, because
    numpy's BLAS would start a thread pool.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # scikit-learn imports pandas if it is installed, and pandas imports pyarrow, whose allocator
    # would start a thread when loaded.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    from ray_workers.training.core import compat_torch

    for module in (*compat_torch.IMPORTED_LATE, *_MODULES):
        importlib.import_module(module)
    for module in compat_torch.IMPORTED_LATE_OPTIONAL:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    from ray_workers import datasets

    datasets.preload()
