"""How a job could be divided, the memory and time of each division, and which is the fastest.

Pure functions of a job document and the known machines, without torch. The memory is computed from
a trace: the operations of a step in order, with the tensors that they keep for the backward pass.
"""
