"""Xid errors of NVIDIA's driver, and what they mean for a GPU.

Source: "Analyzing Xid Errors with the Xid Catalog" for Ampere and newer GPUs,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, compared row by row on
2026-11-30, up to Xid 172. The comments give the catalog's immediate action where it is not
RESET_GPU.
"""

from __future__ import annotations

from collections.abc import Mapping

SICK_XIDS: Mapping[int, str] = {
    46: "the GPU stopped processing",
    48: "uncorrectable memory error",  # WORKFLOW_XID_48: needs a reset of the GPU
    54: "the auxiliary power is not connected",  # CHECK_MECHANICALS
    62: "the GPU's internal microcontroller halted",
    64: "a row of memory could not be remapped",
    74: "NVLink error",  # WORKFLOW_NVLINK_ERR: needs a reset of the GPU
    79: "the GPU has fallen off the bus",  # RESTART_BM
    94: "contained uncorrectable memory error",  # RESTART_APP: reset the GPU when convenient
    95: "uncontained memory error",
    109: "a context switch timed out",
    110: "security fault",
    119: "the GPU's system processor timed out",
    120: "error of the GPU's system processor",
    136: "the training of an NVLink failed",
    140: "unrecovered memory error",
    143: "the GPU could not be initialized",
    156: "a part of the GPU is retired at the next reset",
    158: "fatal timeout of the GPU",
}
"""Xid errors after which the GPU gets no more work.

Left out although the catalog's action is or can be RESET_GPU: 155, which also reports links that
were turned off on purpose, and 144 to 150, whose action depends on details that NVML's event does
not contain. If a link is lost, the watch of the links finds it.
"""
PROGRAM_XIDS: Mapping[int, str] = {
    11: "invalid commands",  # RESTART_APP, CHECK_APP/CUDA, as are 25, 69 and 80
    13: "exception in a kernel",  # RESTART_APP, WORKFLOW_XID_13
    25: "invalid commands",
    31: "memory page fault",  # RESTART_APP, WORKFLOW_XID_31
    43: "the GPU stopped the program",  # IGNORE
    45: "the program's channels were removed",  # WORKFLOW_XID_45
    69: "graphics engine class error",
    80: "corrupted data was sent to the GPU",
    137: "illegal access over NVLink",  # IGNORE
}
"""Xid errors that are usually caused by the program, or follow from its end."""
