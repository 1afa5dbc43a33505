"""How a job could be divided, what that takes of each rank, and which division is the fastest.

Pure: from a job document and what is known of the machines, without torch. The memory is that of a
tape: the operations of a step in their order, each with what it keeps for the backward pass.
"""
