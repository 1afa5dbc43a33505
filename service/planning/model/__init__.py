"""The ways to divide a job, the memory and step time of each way, and the choice of the fastest
way.

This package contains only pure functions of a job document and the known machines, and doesn't
import torch. The memory is computed from a trace: the operations of a step in order, with the
tensors that they keep for the backward pass.
"""
