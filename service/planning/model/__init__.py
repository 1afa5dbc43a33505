"""How a job could be divided, the memory and time of each division, and which is the fastest.

Pure functions of a job document and of the known machines, without torch. The memory is computed
from a trace: a step's operations in order, with the tensors that they keep for the backward pass.
"""
