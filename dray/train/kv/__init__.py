"""A key-value store of tensors for scripts, with the operations of MXNet's KVStore.

    from dray.train import kv

    store = kv.create("dist_sync")        # in the role `server`: serves, then exits
    store.init("weight", weight)
    store.set_optimizer("sgd", lr=0.1)
    for inputs, targets in batches:
        ...
        weight = store.pushpull("weight", gradient)

The script has the roles `worker` and `server`. The servers store the values; each server holds an
equal part of the rows of every key.
"""

from dray.train.kv.store import KVStore, create

__all__ = ["KVStore", "create"]
