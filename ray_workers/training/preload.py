"""Imports all modules that a training process needs, into the parent that forks such processes.

A fork copies only one thread and no CUDA context, so nothing here may start a thread, use a GPU or
open a connection. Each new process imports by itself the modules that are missing here.
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
    "torch.utils.serialization.config",  # the first torch.save and torch.load
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
    """Import all modules, and read the data set that comes with a library. Starts no thread.

    Raises ImportError if a module is missing. Call it before numpy is imported: numpy's BLAS would
    start a pool of threads.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    # scikit-learn imports pandas if it is installed, and pandas imports pyarrow, whose allocator
    # would start a thread when it is loaded.
    os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")
    from ray_workers.training.core import compat_torch

    for module in (*compat_torch.IMPORTED_LATE, *_MODULES):
        importlib.import_module(module)
    for module in compat_torch.IMPORTED_LATE_OPTIONAL:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    from ray_workers import datasets

    datasets.preload()
