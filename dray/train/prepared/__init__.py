"""Training loops of users' own that recover in place: the parts of `train.prepare`.

The modules of this package import torch, so they are imported when a script calls `prepare`, and
not with `dray.train`.
"""
