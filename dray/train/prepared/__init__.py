"""The implementation of `train.prepare`: users' own training loops that recover in place.

The modules of this package import torch, so they are imported only when a script calls `prepare`,
not together with `dray.train`.
"""
