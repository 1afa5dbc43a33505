"""The implementation of `train.prepare`: users' own training loops that recover in place.

The modules of this package import torch. They are therefore imported when a script calls `prepare`,
and not together with `dray.train`.
"""
